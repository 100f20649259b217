"""Falcon-H1 (TII, arXiv:2507.22448): attention and Mamba-2 side by side in every layer, with the factors of muP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    layer_indices,
    llama_config_entries,
    split_words,
)
from mega_ckpt.families.disk_layouts import LAYER
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.hybrid_entries import MAMBA, NO_WINDOW, MambaSectionEntry, mamba_tensor_rules
from mega_ckpt.families.mamba_decoders import FEED_FORWARD_RULES
from mega_ckpt.families.rope_entries import RopeEntry
from mega_common.layer_kinds import HybridConfig, LayerKind, MambaConfig
from mega_common.model_config import ModelConfig

_FACTORS = (
    KeyEntry("attention_in_multiplier", "attention_input", 1.0),
    KeyEntry("attention_out_multiplier", "attention_output", 1.0),
    KeyEntry("key_multiplier", "keys", 1.0),
    KeyEntry("ssm_in_multiplier", "mamba_input", 1.0),
    KeyEntry("ssm_out_multiplier", "mamba_output", 1.0),
)


@dataclass(frozen=True)
class HybridLayersEntry:
    """Translation to and from config.json of hybrid mixers in every layer, their factors, and those of the MLPs."""

    handled_config_keys: frozenset[str] = frozenset().union(
        {"layers_block_type", "layer_types", "ssm_multipliers", "mlp_multipliers"},
        *(entry.handled_config_keys for entry in _FACTORS),
    )
    handled_model_fields: frozenset[str] = frozenset({"layers", "hybrid", "mlp_multipliers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `layers`, `hybrid` and `mlp_multipliers`.
        Raises ConfigMismatchError if a layer is not hybrid.
        """
        layers, mlp = layer_indices(raw), raw.get("mlp_multipliers")
        kinds = raw.get("layers_block_type") or raw.get("layer_types") or ["hybrid"] * len(layers)
        if kinds != ["hybrid"] * len(layers):
            raise ConfigMismatchError(
                f"layers_block_type = {kinds!r:.80} is not supported (only hybrid in every layer)"
            )
        factors = {name: value for entry in _FACTORS for name, value in entry.fields_from_config(raw).items()}
        if raw.get("ssm_multipliers") is not None:
            factors["mamba_projections"] = raw["ssm_multipliers"]
        fields = {"layers": ["hybrid+mlp"] * len(layers), "hybrid": factors}
        return fields if mlp is None or list(mlp) == [1, 1] else {**fields, "mlp_multipliers": mlp}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of the factors; ConfigMismatchError unless every layer is hybrid, with an MLP."""
        if any(kind != LayerKind("hybrid", "mlp") for kind in model.layer_kinds):
            raise ConfigMismatchError("layers must all be 'hybrid+mlp'")
        hybrid = model.hybrid or HybridConfig()
        factors = {key: value for entry in _FACTORS for key, value in entry.config_from_fields(hybrid).items()}
        lists = {"ssm_multipliers": hybrid.mamba_projections, "mlp_multipliers": model.mlp_multipliers or (1.0, 1.0)}
        return {**factors, **{key: list(values) for key, values in lists.items()}}


@dataclass(frozen=True)
class OutputNormEntry:
    """Translation to and from config.json of Falcon-H1's Mamba-2 output norm: before or after the gate, or none."""

    handled_config_keys: frozenset[str] = frozenset({"mamba_rms_norm", "mamba_norm_before_gate"})
    handled_model_fields: frozenset[str] = frozenset({"norm"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `MambaConfig` field `norm` from config.json."""
        before = raw.get("mamba_norm_before_gate", True)
        return {"norm": "none" if not raw.get("mamba_rms_norm", False) else "before_gate" if before else "gated"}

    def config_from_fields(self, model: MambaConfig) -> dict[str, Any]:
        """Return the config.json keys `mamba_rms_norm` and, if the norm exists, `mamba_norm_before_gate`."""
        before = {} if model.norm == "none" else {"mamba_norm_before_gate": model.norm == "before_gate"}
        return {"mamba_rms_norm": model.norm != "none", **before}


_SIZES = MambaSectionEntry((*MAMBA.entries, OutputNormEntry()))


@dataclass(frozen=True)
class FalconMambaSectionEntry:
    """Translation to and from config.json of the sizes of Falcon-H1's Mamba-2, whose width is a key of its own."""

    handled_config_keys: frozenset[str] = _SIZES.handled_config_keys | {
        "mamba_d_ssm",
        "mamba_expand",
        "projectors_bias",
    }
    handled_model_fields: frozenset[str] = frozenset({"mamba"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` section `mamba` from config.json.

        Raises:
            ConfigMismatchError: if the heads have another width together, or only one of both projections a bias.
        """
        width, heads = raw.get("mamba_d_ssm", 1024), raw.get("mamba_n_heads", 128)
        width = int(raw.get("mamba_expand", 2) * raw.get("hidden_size", 0)) if width is None else width
        size = raw.get("mamba_d_head", "auto")
        section = _SIZES.fields_from_config({**raw, "mamba_d_head": width // heads if size == "auto" else size})
        if heads * section["mamba"]["head_dim"] != width:
            raise ConfigMismatchError(f"mamba_n_heads = {heads} times mamba_d_head = {size} must be the width {width}")
        bias = section["mamba"]["bias"]
        if raw.get("projectors_bias", False) != bias:
            raise ConfigMismatchError(f"projectors_bias must be mamba_proj_bias = {bias}")
        return section

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of the sizes of Mamba-2; ConfigMismatchError for a model without a section `mamba`."""
        if model.mamba is None:
            raise ConfigMismatchError("mamba is missing (all layers of this family have it)")
        sizes = _SIZES.config_from_fields(model)
        return {**sizes, "mamba_d_ssm": model.mamba.inner_size, "projectors_bias": model.mamba.bias}


FALCON_H1 = ModelFamily(
    name="falcon_h1",
    architecture="FalconH1ForCausalLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(kv_default=8, explicit_dim=False),
        RopeEntry(),
        HybridLayersEntry(),
        FalconMambaSectionEntry(),
        KeyEntry("embedding_multiplier", "embedding_multiplier", 1.0),
        KeyEntry("lm_head_multiplier", "logit_scale", 1.0),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        *NO_WINDOW,
        FixedFieldsEntry({"qk_norm": False}),
    ),
    rules=(*mamba_tensor_rules(f"{LAYER}.mamba"), *FEED_FORWARD_RULES),
    carried=split_words("num_logits_to_keep mamba_use_mlp mlp_expansion_factor attn_layer_indices"),
)
