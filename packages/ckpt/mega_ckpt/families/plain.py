"""Configurations that say the same thing in two ways."""

from __future__ import annotations

import math
from typing import Any

from mega_common.model_config import ModelConfig, MoeConfig

# How a model is trained rather than what it is: a config.json that cannot say it loses nothing that inference needs.
TRAINING_FIELDS = frozenset(
    {"attention_dropout", "embedding_dropout", "init_std", "mtp_loss", "residual_dropout", "scale_residual_init"}
)
MOE_TRAINING_FIELDS = frozenset({"aux_loss", "aux_loss_scope", "bias_rate", "capacity_factor", "sinkhorn", "z_loss"})


def same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configurations compute the same from the same weights: defaults filled in, training set aside."""
    return one.num_layers == other.num_layers and resolved(one) == resolved(other)


def plain(model: ModelConfig) -> ModelConfig:
    """The same model, without lists of layers that single nothing out and settings of windows that are not there."""
    unused: dict[str, Any] = {} if model.norm == "layernorm" else {"norm_bias": True}
    if model.attention_scale and math.isclose(model.attention_scale, model.head_size**-0.5, rel_tol=1e-12):
        unused["attention_scale"] = None
    return model.model_copy(update={**_windows(model), **_unrotated(model), **_experts(model), **unused})


def resolved(model: ModelConfig) -> ModelConfig:
    """What counts when a model computes from its weights, defaults filled in."""
    training = {name: ModelConfig.model_fields[name].default for name in TRAINING_FIELDS}
    heads = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    out = plain(model).model_copy(update={**training, **heads})
    if out.moe is None:
        return out
    unused = {"group_score"} if out.moe.groups == 1 else set()
    aside = {name: MoeConfig.model_fields[name].default for name in MOE_TRAINING_FIELDS | unused}
    dense = out.ffn_hidden_size if out.moe.layers is not None else 0  # which no layer has
    return out.model_copy(update={"moe": out.moe.model_copy(update=aside), "ffn_hidden_size": dense})


def _windows(model: ModelConfig) -> dict[str, Any]:
    layers = range(model.num_layers + model.mtp_layers)
    full = [layer for layer in layers if model.window(layer) is None]
    if len(full) == len(layers):
        return dict.fromkeys(("sliding_window", "full_attention_layers", "local_rope"))
    same = model.local_rope == model.rope
    return {"full_attention_layers": full or None, "local_rope": None if same else model.local_rope}


def _unrotated(model: ModelConfig) -> dict[str, Any]:
    layers = range(model.num_layers + model.mtp_layers) if model.position == "rope" else ()
    return {"no_rope_layers": [layer for layer in layers if not model.rotates(layer)] or None}


def _experts(model: ModelConfig) -> dict[str, Any]:
    if model.moe is None:
        return {}
    layers = range(model.num_layers + model.mtp_layers)
    sparse = [layer for layer in layers if model.has_experts(layer)]
    if len(sparse) < len(layers):
        return {"moe": model.moe.model_copy(update={"layers": sparse})}
    return {"moe": model.moe.model_copy(update={"layers": None})}
