"""Configurations that say the same thing in two ways."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mega_common.config import Config
from mega_common.encoder import RelativeConfig
from mega_common.model_config import ModelConfig, RopeConfig

# How a model is trained rather than what it is: a config.json that cannot say it loses nothing that inference needs.
TRAINING_FIELDS = frozenset(
    {"attention_dropout", "embedding_dropout", "init_std", "mtp_loss", "residual_dropout", "scale_residual_init"}
)
_MIXER_TRAINING = ("chunk_size", "dt_init", "dt_init_floor")  # of Mamba-2 and of gated delta nets
_NO_HEADS = {"num_attention_heads": 1, "num_kv_heads": 1, "head_dim": 1}
OF_ATTENTION = frozenset({
    "num_kv_heads", "head_dim", "rope", "local_rope", "no_rope_layers", "qkv_bias", "attention_out_bias", "qk_norm",
    "qk_norm_span", "sliding_window", "full_attention_layers", "attention_scale", "attention_softcap", "attention_sinks",
    "attention_gate",
})  # fmt: skip
MOE_TRAINING_FIELDS = frozenset({"aux_loss", "aux_loss_scope", "bias_rate", "capacity_factor", "sinkhorn", "z_loss"})


def same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configurations compute the same from the same weights: defaults filled in, training set aside."""
    return one.num_layers == other.num_layers and resolved(one) == resolved(other)


def plain(model: ModelConfig) -> ModelConfig:
    """The same model, without lists of layers that single nothing out and settings of what is not there."""
    unused: dict[str, Any] = {} if model.norm == "layernorm" else {"norm_bias": True}
    if model.attention_scale and math.isclose(model.attention_scale, model.head_size**-0.5, rel_tol=1e-12):
        unused["attention_scale"] = None
    if model.position != "rope":
        unused |= {"rope": RopeConfig(), "local_rope": None}
    if model.position != "relative":
        unused["relative"] = RelativeConfig()
    return model.model_copy(
        update={**_windows(model), **_unrotated(model), **_layers(model), **unused, **_mixers(model)}
    )


def resolved(model: ModelConfig) -> ModelConfig:
    """What counts when a model computes from its weights, defaults filled in."""
    training = {name: ModelConfig.model_fields[name].default for name in TRAINING_FIELDS}
    kinds = model.kinds
    attends = any(kind.mixer == "attention" for kind in kinds)
    heads = {"num_kv_heads": model.kv_heads, "head_dim": model.head_size}
    unread = _NO_HEADS | ({} if model.position == "learned" else {"max_position": 1})
    width = {} if any(kind.feed == "mlp" for kind in kinds) else {"ffn_hidden_size": 0}
    out = plain(model).model_copy(update={**training, **(heads if attends else unread), **width})
    sections: dict[str, Any] = {}
    for name in ("mamba", "delta"):
        if section := getattr(out, name):
            own = ("norm_eps",) if section.norm_eps == model.norm_eps else ()
            sections[name] = _at_default(section, (*_MIXER_TRAINING, *own))
    if out.vision:
        sections["vision"] = _at_default(out.vision, ("mean", "std", "resize", "resample"))
    if out.moe:
        unused = MOE_TRAINING_FIELDS | ({"group_score"} if out.moe.groups == 1 else set())
        sections["moe"] = _at_default(out.moe, unused)
    return out.model_copy(update=sections)


def _at_default(section: Config, names: Iterable[str]) -> Config:
    fields = type(section).model_fields
    return section.model_copy(update={name: fields[name].default for name in names if name in fields})


def _attention_layers(model: ModelConfig) -> list[int]:
    return [layer for layer, kind in enumerate(model.kinds) if kind.mixer == "attention"]


def _windows(model: ModelConfig) -> dict[str, Any]:
    layers = _attention_layers(model)
    full = [layer for layer in layers if model.window(layer) is None]
    if len(full) == len(layers):
        return dict.fromkeys(("sliding_window", "full_attention_layers", "local_rope"))
    same = model.local_rope == model.rope
    return {"full_attention_layers": full or None, "local_rope": None if same else model.local_rope}


def _unrotated(model: ModelConfig) -> dict[str, Any]:
    layers = _attention_layers(model) if model.position == "rope" else ()
    return {"no_rope_layers": [layer for layer in layers if not model.rotates(layer)] or None}


def _layers(model: ModelConfig) -> dict[str, Any]:
    """The kinds of layers by `moe.layers` alone where that can say it, else by `layers` alone."""
    kinds = model.kinds
    sparse = [layer for layer, kind in enumerate(kinds) if kind.feed == "moe"]
    usual = all(kind.mixer == "attention" and kind.feed for kind in kinds)
    some = sparse if usual and len(sparse) < len(kinds) else None
    moe = model.moe.model_copy(update={"layers": some}) if model.moe and sparse else None
    return {"layers": None if usual else ["+".join(filter(None, kind)) for kind in kinds], "moe": moe}


def _mixers(model: ModelConfig) -> dict[str, Any]:
    """Settings of mixers that no layer has."""
    there = {kind.mixer for kind in model.kinds}
    unused: dict[str, Any] = dict.fromkeys({"mamba", "delta"} - there)
    if "attention" not in there:
        unused |= {name: ModelConfig.model_fields[name].get_default(call_default_factory=True) for name in OF_ATTENTION}
        unused["position"] = "learned" if model.position == "learned" else "none"
    return unused
