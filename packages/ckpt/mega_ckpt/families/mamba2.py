"""Mamba-2 (arXiv:2405.21060), layers of nothing else, as transformers has it: Codestral Mamba, and state-spaces' own, converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import Family, words
from mega_ckpt.families.common import TIED
from mega_ckpt.families.hybrid import NO_WINDOW, Mamba, TimeLimit, Unused, mamba_rules
from mega_ckpt.families.keys import Fixed, Key, MismatchError, Only, Raw, layer_numbers
from mega_ckpt.families.layouts import Rule
from mega_common.model_config import ModelConfig

_LAYER = "backbone.layers.{i}"


@dataclass(frozen=True)
class OnlyMamba:
    """Every layer is Mamba-2; no key speaks of it."""

    keys: frozenset[str] = frozenset({"num_hidden_layers", "layer_types"})
    fields: frozenset[str] = frozenset({"num_layers", "layers"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The layers."""
        layers = layer_numbers({"num_hidden_layers": 64, **raw})
        return {"num_layers": len(layers), "layers": ["mamba"] * len(layers)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Their number, when the model agrees."""
        if any(kind != ("mamba", None) for kind in model.kinds):
            raise MismatchError("layers must all be mamba")
        return {"num_hidden_layers": model.num_layers}


MAMBA2 = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    entries=(
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_size"),
        OnlyMamba(),
        Mamba(
            (
                Key("num_heads", "num_heads", 128),
                Key("head_dim", "head_dim", 64),
                Key("state_size", "state_size", 128),
                Key("n_groups", "num_groups", 8),
                Key("conv_kernel", "conv_kernel", 4),
                Key("chunk_size", "chunk_size", 256),
                Key("use_conv_bias", "conv_bias", True),
                Key("use_bias", "bias", False),
                TimeLimit(),
            ),
            expand="expand",
        ),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("initializer_range", "init_std", 0.1),
        TIED,
        Only({"hidden_act": ("silu", "swish")}),
        *NO_WINDOW,
        Unused({"num_attention_heads": 1, "ffn_hidden_size": "hidden_size", "max_position": 4096}),
        Fixed({"norm": "rmsnorm", "position": "none"}),
    ),
    prefix="backbone.",
    rules=(
        Rule("backbone.embeddings.weight", ("model.embed_tokens.weight",)),
        Rule(f"{_LAYER}.norm.weight", ("model.layers.{i}.input_layernorm.weight",)),
        *mamba_rules(f"{_LAYER}.mixer"),
        Rule("backbone.norm_f.weight", ("model.norm.weight",)),
    ),
    # How steps begin, and in which precision layers are added.
    carried=words(
        """rescale_prenorm_residual residual_in_fp32 time_step_rank time_step_min time_step_max time_step_floor rms_norm
        intermediate_size norm_before_gate num_attention_heads max_position_embeddings"""
    ),
)
