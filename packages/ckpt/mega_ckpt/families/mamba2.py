"""Mamba-2 (arXiv:2405.21060) as in transformers, with Mamba-2 in every layer: Codestral Mamba, and converted models of
state-spaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.common_entries import TIED
from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    HfConfigDict,
    KeyEntry,
    layer_indices,
)
from mega_ckpt.families.disk_layouts import TensorRule
from mega_ckpt.families.family import ModelFamily, split_words
from mega_ckpt.families.hybrid_entries import (
    NO_WINDOW,
    MambaSectionEntry,
    TimeStepLimitEntry,
    UnusedFieldsEntry,
    mamba_tensor_rules,
)
from mega_common.model_config import ModelConfig

_LAYER = "backbone.layers.{i}"


@dataclass(frozen=True)
class MambaLayersEntry:
    """Mamba-2 in every layer, without a key."""

    covered_keys: frozenset[str] = frozenset({"num_hidden_layers", "layer_types"})
    covered_fields: frozenset[str] = frozenset({"num_layers", "layers"})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return the layers."""
        layers = layer_indices({"num_hidden_layers": 64, **raw})
        return {"num_layers": len(layers), "layers": ["mamba"] * len(layers)}

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the number of layers, after checking that all are Mamba-2."""
        if any(kind != ("mamba", None) for kind in model.layer_kinds):
            raise ConfigMismatchError("layers must all be mamba")
        return {"num_hidden_layers": model.num_layers}


MAMBA2 = ModelFamily(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size", "hidden_size"),
        MambaLayersEntry(),
        MambaSectionEntry(
            (
                KeyEntry("num_heads", "num_heads", 128),
                KeyEntry("head_dim", "head_dim", 64),
                KeyEntry("state_size", "state_size", 128),
                KeyEntry("n_groups", "num_groups", 8),
                KeyEntry("conv_kernel", "conv_kernel", 4),
                KeyEntry("chunk_size", "chunk_size", 256),
                KeyEntry("use_conv_bias", "conv_bias", True),
                KeyEntry("use_bias", "bias", False),
                TimeStepLimitEntry(),
            ),
            expand="expand",
        ),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry("initializer_range", "init_std", 0.1),
        TIED,
        AllowedValuesEntry({"hidden_act": ("silu", "swish")}),
        *NO_WINDOW,
        UnusedFieldsEntry({"num_attention_heads": 1, "ffn_hidden_size": "hidden_size", "max_position": 4096}),
        FixedFieldsEntry({"norm": "rmsnorm", "position": "none"}),
    ),
    prefix="backbone.",
    rules=(
        TensorRule("backbone.embeddings.weight", ("model.embed_tokens.weight",)),
        TensorRule(f"{_LAYER}.norm.weight", ("model.layers.{i}.input_layernorm.weight",)),
        *mamba_tensor_rules(f"{_LAYER}.mixer"),
        TensorRule("backbone.norm_f.weight", ("model.norm.weight",)),
    ),
    # How steps begin, and in which precision layers are added.
    carried=split_words(
        """rescale_prenorm_residual residual_in_fp32 time_step_rank time_step_min time_step_max time_step_floor rms_norm
        intermediate_size norm_before_gate num_attention_heads max_position_embeddings"""
    ),
)
