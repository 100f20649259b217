"""Granite 3 (IBM), dense and with experts: Llama with four multipliers, on embeddings, residuals, attention scores and
logits. `granitemoeshared` adds a shared expert; `granite_swa` and `granitemoe_swa` have windows and attention sinks.
HyperCLOVA X (NAVER, arXiv:2506.22403): the same multipliers, and norms before and after attention and MLP.
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
    layer_indices,
    llama_config_entries,
)
from mega_ckpt.families.disk_layouts import LAYER, ConcatExpertsLayout, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import MoeInAllLayersEntry, MoeSectionEntry, build_router_config_entries
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import LayerTypesEntry, UniformWindowEntry
from mega_common.model_config import ModelConfig

_MOE = "model.layers.{i}.block_sparse_moe"
_EXPERTS = "model.layers.{i}.mlp.experts"


@dataclass(frozen=True)
class LogitsScalingEntry:
    """Translation to and from config.json of Granite's `logits_scaling`, which divides the logits."""

    handled_config_keys: frozenset[str] = frozenset({"logits_scaling"})
    handled_model_fields: frozenset[str] = frozenset({"logit_scale"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `logit_scale`, the inverse of config.json's `logits_scaling`; ConfigMismatchError if that is not positive."""
        divisor = raw.get("logits_scaling", 1.0)
        if not divisor > 0:
            raise ConfigMismatchError(f"logits_scaling = {divisor!r} must be more than 0")
        return {"logit_scale": 1 / divisor}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `logits_scaling` of config.json with its value, the inverse of `logit_scale`.
        It is rounded if rounding loses nothing.
        """
        near = 1 / model.logit_scale
        return {
            "logits_scaling": next((n for n in (round(near), round(near, 6)) if n and 1 / n == model.logit_scale), near)
        }


@dataclass(frozen=True)
class AttentionMultiplierEntry:
    """Translation to and from config.json of Granite's `attention_multiplier`, the factor on scores, 1 by default."""

    handled_config_keys: frozenset[str] = frozenset({"attention_multiplier"})
    handled_model_fields: frozenset[str] = frozenset({"attention_scale"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `attention_scale` from `attention_multiplier`."""
        return {"attention_scale": raw.get("attention_multiplier", 1.0)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `attention_multiplier` of config.json with its value, the scale of attention logits.
        Mega's default scale, head_dim^-0.5, is written as a number.
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
                *build_router_config_entries("num_local_experts num_experts", top_k=2, normalize=True, experts=8),
                KeyEntry("intermediate_size", "ffn_hidden_size"),
            ),
            MoeInAllLayersEntry(),
        ),
        FixedFieldsEntry({"mlp_bias": False}),
    ),
    rules=MOE_RULES,
)


@dataclass(frozen=True)
class LayerRopeThetaConfigEntry:
    """Translation to and from config.json of `layer_rope_theta`, a RoPE base frequency for each layer, 0 for none.
    The `ModelConfig` has one frequency for the layers with and one for those without a window.
    """

    rope: RopeEntry
    handled_model_fields: frozenset[str] = frozenset({"rope", "local_rope", "no_rope_layers"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return self.rope.handled_config_keys | {"layer_rope_theta"}

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `rope`, `local_rope` and `no_rope_layers`; ConfigMismatchError if layers of one kind differ in theta."""
        rope = self.rope.fields_from_config(raw)["rope"]
        windows = WINDOWS.fields_from_config(raw)
        full = windows.get("full_attention_layers") or [] if windows["sliding_window"] else layer_indices(raw)
        thetas = raw.get("layer_rope_theta") or [rope["theta"] for _ in layer_indices(raw)]
        if len(thetas) != len(layer_indices(raw)):
            raise ConfigMismatchError(
                f"layer_rope_theta must have a number for each of {len(layer_indices(raw))} layers"
            )
        found = {
            kind: {theta for layer, theta in enumerate(thetas) if theta and (layer in full) == (kind == "full")}
            for kind in ("full", "local")
        }
        if any(len(values) > 1 for values in found.values()):
            raise ConfigMismatchError("layer_rope_theta must have one value for layers with and one without a window")
        own = {kind: {**rope, "theta": min(values, default=rope["theta"])} for kind, values in found.items()}
        unrotated = [layer for layer, theta in enumerate(thetas) if not theta]
        return {"rope": own["full"], "local_rope": own["local"], "no_rope_layers": unrotated or None}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of RoPE and `layer_rope_theta`; ConfigMismatchError if `local_rope` differs in more than theta."""
        local = model.local_rope or model.rope
        if local.model_copy(update={"theta": model.rope.theta}) != model.rope:
            raise ConfigMismatchError("local_rope may differ from rope in theta only")
        thetas = [
            0.0 if not model.has_rotary_positions(layer)
            else (model.rope if model.get_attention_window(layer) is None else local).theta
            for layer in range(model.num_layers)
        ]  # fmt: skip
        return {**self.rope.config_from_fields(model), "layer_rope_theta": thetas}


WINDOWS = LayerTypesEntry(size=128, every=4, first=0)
_WINDOWED: tuple[ConfigEntry, ...] = (
    KeyValueHeadsEntry(explicit_dim=False),
    *MULTIPLIERS,
    LayerRopeThetaConfigEntry(RopeEntry()),
    WINDOWS,
    FixedFieldsEntry({"qk_norm": False, "attention_sinks": True}),
)

GRANITE_SWA = ModelFamily(
    name="granite_swa",
    architecture="GraniteSWAForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        *_WINDOWED,
        KeyValueHeadsEntry(kv_default=4, explicit_dim=False),
        KeyEntry("mlp_bias", "mlp_bias", False),
    ),
    tokens=("bos_token_id", "eos_token_id"),
)


def granite_shared_mlp_rules(module: str) -> tuple[TensorRule, ...]:
    """Return the tensor rules of Granite's `shared_mlp`, with gate and up projection fused.
    `module` is its canonical name in a layer.
    """
    shared, own = f"{LAYER}.shared_mlp", f"{LAYER}.{module}"
    return (
        TensorRule(f"{shared}.input_linear.weight", (f"{own}.gate_proj.weight", f"{own}.up_proj.weight")),
        TensorRule(f"{shared}.output_linear.weight", (f"{own}.down_proj.weight",)),
    )


_SHARED_MOE = MoeSectionEntry(
    (
        *build_router_config_entries("num_local_experts num_experts", top_k=2, normalize=True, experts=8),
        KeyEntry("intermediate_size", "ffn_hidden_size"),
        KeyEntry("shared_intermediate_size", "shared_ffn_hidden_size", 0),
    ),
    MoeInAllLayersEntry(),
)

GRANITE_MOE_SHARED = ModelFamily(
    name="granitemoeshared",
    architecture="GraniteMoeSharedForCausalLM",
    entries=(*_SHARED, _SHARED_MOE, FixedFieldsEntry({"mlp_bias": False})),
    rules=(*MOE_RULES, *granite_shared_mlp_rules("mlp.shared_expert")),
)

GRANITE_MOE_SWA = ModelFamily(
    name="granitemoe_swa",
    architecture="GraniteMoeSWAForCausalLM",
    entries=(*DECODER, *_WINDOWED, _SHARED_MOE, FixedFieldsEntry({"mlp_bias": False})),
    rules=(
        TensorRule(f"{_MOE}.router.weight", (f"{LAYER}.mlp.gate.weight",)),
        *(
            TensorRule(
                f"{_MOE}.experts.{disk}", tuple(f"{_EXPERTS}.{part}.weight" for part in parts), ConcatExpertsLayout()
            )
            for disk, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
        ),
        *granite_shared_mlp_rules("mlp.shared_expert"),
    ),
)


@dataclass(frozen=True)
class HyperClovaXNormConfigEntry:
    """Translation to and from config.json of HyperCLOVA X's `attention_multiplier` and `use_post_norm`.
    The multiplier is absent or null for the usual scale.
    """

    handled_config_keys: frozenset[str] = frozenset({"attention_multiplier", "use_post_norm"})
    handled_model_fields: frozenset[str] = frozenset({"attention_scale", "norm_position"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields `attention_scale` and `norm_position` from config.json."""
        position = "both" if raw.get("use_post_norm", True) else "pre"
        return {"attention_scale": raw.get("attention_multiplier"), "norm_position": position}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return `attention_multiplier` and `use_post_norm`; ConfigMismatchError for another norm position than pre and both."""
        if model.norm_position not in ("pre", "both"):
            raise ConfigMismatchError(f"norm_position must be pre or both, not {model.norm_position}")
        scale = model.attention_scale or model.query_key_head_dim**-0.5
        return {"attention_multiplier": scale, "use_post_norm": model.norm_position == "both"}


HYPERCLOVAX = ModelFamily(
    name="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    entries=(
        *DECODER,
        KeyValueHeadsEntry(divisible=True),
        RopeEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        KeyEntry("embedding_multiplier", "embedding_multiplier", 1.0),
        KeyEntry("residual_multiplier", "residual_multiplier", 1.0),
        KeyEntry("logits_scaling", "logit_scale", 1.0),
        HyperClovaXNormConfigEntry(),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry({"qk_norm": False}),
    ),
    rules=(
        TensorRule(f"{LAYER}.post_attention_layernorm.weight", (f"{LAYER}.pre_feedforward_layernorm.weight",)),
        TensorRule(
            f"{LAYER}.post_norm1.weight",
            (f"{LAYER}.post_attention_layernorm.weight",),
            requires=f"{LAYER}.pre_feedforward_layernorm.weight",
        ),
        TensorRule(f"{LAYER}.post_norm2.weight", (f"{LAYER}.post_feedforward_layernorm.weight",)),
    ),
)
