"""Granite 3 (IBM), dense and with experts: Llama with four multipliers, on embeddings, residuals, attention scores and
logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    DECODER,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
)
from mega_ckpt.families.disk_layouts import ConcatExpertsLayout, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import MoeInAllLayersEntry, MoeSectionEntry, router_entries
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import UniformWindowEntry
from mega_common.model_config import ModelConfig

_MOE = "model.layers.{i}.block_sparse_moe"
_EXPERTS = "model.layers.{i}.mlp.experts"


@dataclass(frozen=True)
class LogitsScalingEntry:
    """Config entry for Granite's `logits_scaling`, which divides the logits."""

    handled_config_keys: frozenset[str] = frozenset({"logits_scaling"})
    handled_model_fields: frozenset[str] = frozenset({"logit_scale"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `logit_scale`, the inverse of `logits_scaling`."""
        divisor = raw.get("logits_scaling", 1.0)
        if not divisor > 0:
            raise ConfigMismatchError(f"logits_scaling = {divisor!r} must be more than 0")
        return {"logit_scale": 1 / divisor}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json key `logits_scaling`, the inverse of `logit_scale`, rounded if rounding loses nothing."""
        near = 1 / model.logit_scale
        return {
            "logits_scaling": next((n for n in (round(near), round(near, 6)) if n and 1 / n == model.logit_scale), near)
        }


@dataclass(frozen=True)
class AttentionMultiplierEntry:
    """Config entry for Granite's `attention_multiplier`, the factor on attention scores, 1 by default."""

    handled_config_keys: frozenset[str] = frozenset({"attention_multiplier"})
    handled_model_fields: frozenset[str] = frozenset({"attention_scale"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `attention_scale` from `attention_multiplier`."""
        return {"attention_scale": raw.get("attention_multiplier", 1.0)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json key `attention_multiplier`; mega's default scale, head_dim^-0.5, is written as a
        number.
        """
        return {"attention_multiplier": model.attention_scale or model.query_key_head_dim**-0.5}


MULTIPLIERS: tuple[ConfigEntry, ...] = (
    KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
    KeyEntry("embedding_multiplier", "embedding_multiplier", 1.0),
    KeyEntry("residual_multiplier", "residual_multiplier", 1.0),
    AttentionMultiplierEntry(),
    LogitsScalingEntry(),
)
MOE_RULES = (
    TensorRule(f"{_MOE}.router.layer.weight", ("model.layers.{i}.mlp.gate.weight",)),
    TensorRule(
        f"{_MOE}.input_linear.weight",
        (f"{_EXPERTS}.gate_proj.weight", f"{_EXPERTS}.up_proj.weight"),
        ConcatExpertsLayout(),
    ),
    TensorRule(f"{_MOE}.output_linear.weight", (f"{_EXPERTS}.down_proj.weight",), ConcatExpertsLayout()),
)
_SHARED: tuple[ConfigEntry, ...] = (
    *DECODER,
    KeyValueHeadsEntry(explicit_dim=False),
    RopeEntry(),
    *MULTIPLIERS,
    UniformWindowEntry(supports_windows=False),
    FixedFieldsEntry({"qk_norm": False}),
)

GRANITE = ModelFamily(
    name="granite",
    architecture="GraniteForCausalLM",
    entries=(*_SHARED, KeyEntry("mlp_bias", "mlp_bias", False)),
)

GRANITE_MOE = ModelFamily(
    name="granitemoe",
    architecture="GraniteMoeForCausalLM",
    entries=(
        *_SHARED,
        MoeSectionEntry(
            (
                *router_entries("num_local_experts num_experts", top_k=2, normalize=True, experts=8),
                KeyEntry("intermediate_size", "ffn_hidden_size"),
            ),
            MoeInAllLayersEntry(),
        ),
        FixedFieldsEntry({"mlp_bias": False}),
    ),
    rules=MOE_RULES,
)
