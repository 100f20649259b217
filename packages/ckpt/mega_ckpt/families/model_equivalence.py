"""Equivalence of model configurations that differ only in form."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from mega_common.encoder_config import RelativePositionConfig
from mega_common.layer_kinds import COMPRESSED_MIXERS
from mega_common.model_config import ModelConfig, RopeConfig
from mega_common.strict_config import StrictConfig

# Training settings: a config.json without a key for them lacks nothing that inference needs.
TRAINING_FIELDS = frozenset(
    {"attention_dropout", "embedding_dropout", "init_std", "mtp_loss", "residual_dropout", "scale_residual_init"}
)
_MIXER_TRAINING = ("chunk_size", "dt_init", "dt_init_floor")  # of recurrent mixers
_NO_HEADS = {"num_attention_heads": 1, "num_kv_heads": 1, "head_dim": 1}
ATTENTION_FIELDS = frozenset({
    "num_kv_heads", "head_dim", "rope", "local_rope", "no_rope_layers", "qkv_bias", "qkv_clip", "attention_out_bias", "output_input_norms", "qk_norm",
    "qk_norm_span", "qk_norm_after_rope", "sliding_window", "full_attention_layers", "chunked_window", "no_rope_scaling", "attention_scale", "attention_softcap", "attention_sinks",
    "attention_gate", "full_attention", "value_norm", "keys_are_values", "value_head_dim", "value_scale", "softplus_gate",
    "shared_kv_layers", "shared_kv_ffn_hidden_size",
})  # fmt: skip
MOE_TRAINING_FIELDS = frozenset({"aux_loss", "aux_loss_scope", "bias_rate", "capacity_factor", "sinkhorn", "z_loss"})


def is_equivalent_config(one: ModelConfig, other: ModelConfig) -> bool:
    """Return whether two model configurations compute the same function from the same weights.
    Training settings are ignored.
    """
    return one.num_layers == other.num_layers and canonicalize_model_config(one) == canonicalize_model_config(other)


def drop_redundant_model_fields(model: ModelConfig) -> ModelConfig:
    """Return an equivalent configuration of `model` without redundant layer lists and settings of absent parts."""
    unused: dict[str, Any] = {} if model.norm == "layernorm" and model.norm_weight else {"norm_bias": True}
    if (
        model.attention_scale
        and not model.full_attention
        and math.isclose(model.attention_scale, model.query_key_head_dim**-0.5, rel_tol=1e-12)
    ):
        unused["attention_scale"] = None
    if model.position != "rope":
        unused |= {"rope": RopeConfig(), "local_rope": None}
    if model.position != "relative" and not model.relative_bias:
        unused["relative"] = RelativePositionConfig()
    return model.model_copy(
        update={
            **_normalize_windows(model),
            **_normalize_no_rope(model),
            **_normalize_layers(model),
            **_normalize_norm_positions(model),
            **unused,
            **_reset_unused_mixers(model),
        }
    )


def canonicalize_model_config(model: ModelConfig) -> ModelConfig:
    """Return a model configuration in a normal form in which equivalent models compare equal.
    Defaults are filled in, and settings that do not affect the output for given weights are reset.
    """
    training = {name: ModelConfig.model_fields[name].default for name in TRAINING_FIELDS}
    kinds = model.layer_kinds
    attends = any(mixer in ("attention", *COMPRESSED_MIXERS) for kind in kinds for mixer in kind.mixers)
    heads = {"num_kv_heads": model.key_value_heads, "head_dim": model.query_key_head_dim}
    unread = _NO_HEADS | ({} if model.position == "learned" else {"max_position": 1})
    width = {} if any(kind.feed_forward == "mlp" for kind in kinds) else {"ffn_hidden_size": 0}
    out = drop_redundant_model_fields(model).model_copy(update={**training, **(heads if attends else unread), **width})
    sections: dict[str, Any] = {}
    for name in ("mamba", "mamba1", "delta", "kda", "lightning"):
        if section := getattr(out, name):
            own = ("norm_eps",) if section.norm_eps == model.norm_eps else ()
            sections[name] = _reset_fields(section, (*_MIXER_TRAINING, *own))
    if out.vision:
        module = out.vision.module and _reset_fields(out.vision.module, ("image_processor", "processor", "tokens"))
        pixels = _reset_fields(out.vision, ("mean", "std", "resize", "resample"))
        sections["vision"] = pixels.model_copy(update={"module": module})
    if out.mla and out.mla.indexer:
        indexer = _reset_fields(out.mla.indexer, ("dense", "kl_loss"))
        sections["mla"] = out.mla.model_copy(update={"indexer": indexer})
    if out.moe:
        unused = MOE_TRAINING_FIELDS | ({"group_score"} if out.moe.groups == 1 else set())
        unused |= {"jitter"} if out.moe.score != "sparsemixer" else set()
        sections["moe"] = _reset_fields(out.moe, unused)
    return out.model_copy(update=sections)


def _reset_fields(section: StrictConfig, names: Iterable[str]) -> StrictConfig:
    fields = type(section).model_fields
    return section.model_copy(update={name: fields[name].default for name in names if name in fields})


def _attention_layers(model: ModelConfig) -> list[int]:
    return [layer for layer, kind in enumerate(model.layer_kinds) if "attention" in kind.mixers]


def _normalize_windows(model: ModelConfig) -> dict[str, Any]:
    if model.compressed:
        return {"local_rope": None if model.local_rope == model.rope else model.local_rope}
    layers = _attention_layers(model)
    full = [layer for layer in layers if model.get_attention_window(layer) is None]
    if len(full) == len(layers):
        return {"sliding_window": None, "full_attention_layers": None, "local_rope": None, "chunked_window": False}
    same = model.local_rope == model.rope
    return {"full_attention_layers": full or None, "local_rope": None if same else model.local_rope}


def _normalize_no_rope(model: ModelConfig) -> dict[str, Any]:
    layers = _attention_layers(model) if model.position == "rope" else ()
    unrotated = [layer for layer in layers if not model.has_rotary_positions(layer)]
    return {"no_rope_layers": unrotated or None, **({} if unrotated else {"no_rope_scaling": None})}


def _normalize_layers(model: ModelConfig) -> dict[str, Any]:
    """Return the layer kinds as `moe.layers` alone if possible, else as `layers` alone."""
    kinds = model.layer_kinds
    sparse = [layer for layer, kind in enumerate(kinds) if kind.feed_forward == "moe"]
    usual = all(kind.mixer == "attention" and kind.feed_forward for kind in kinds)
    some = sparse if usual and len(sparse) < len(kinds) else None
    moe = model.moe.model_copy(update={"layers": some}) if model.moe and sparse else None
    return {"layers": None if usual else ["+".join(filter(None, kind)) for kind in kinds], "moe": moe}


def _normalize_norm_positions(model: ModelConfig) -> dict[str, Any]:
    """Return the norm position of the first mixer by name, and of other mixers where it differs."""
    mixers = sorted({kind.mixer or "" for kind in model.layer_kinds})
    if not model.norm_positions or "" in mixers:
        return {
            "norm_positions": {mixer: model.norm_positions[mixer] for mixer in mixers if mixer in model.norm_positions}
        }
    positions = {mixer: model.norm_positions.get(mixer, model.norm_position) for mixer in mixers}
    first = positions[mixers[0]]
    return {"norm_position": first, "norm_positions": {name: each for name, each in positions.items() if each != first}}


def _reset_unused_mixers(model: ModelConfig) -> dict[str, Any]:
    """Return default settings for the mixers that no layer has."""
    used = {mixer for kind in model.layer_kinds for mixer in (kind.mixer, *kind.mixers)}
    unused: dict[str, Any] = dict.fromkeys({"mamba", "mamba1", "delta", "kda", "lightning", "conv", "hybrid"} - used)
    if used.isdisjoint(COMPRESSED_MIXERS):
        unused["compressed"] = None
    if used.isdisjoint({"attention", *COMPRESSED_MIXERS}):
        unused |= {
            name: ModelConfig.model_fields[name].get_default(call_default_factory=True) for name in ATTENTION_FIELDS
        }
        unused["position"] = "learned" if model.position == "learned" else "none"
    return unused
