"""Config entries shared by several families."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    HeadsEntry,
    HfConfigDict,
    KeyEntry,
    check_head_dim,
    check_head_size,
)
from mega_common.model_config import ModelConfig

# The keys that nearly every decoder has.
SIZES: tuple[ConfigEntry, ...] = (
    KeyEntry("vocab_size", "vocab_size"),
    KeyEntry("hidden_size", "hidden_size"),
    KeyEntry("intermediate_size", "ffn_hidden_size"),
    KeyEntry("num_hidden_layers", "num_layers"),
    KeyEntry("num_attention_heads", "num_attention_heads"),
    KeyEntry("max_position_embeddings", "max_position"),
    KeyEntry("initializer_range", "init_std", 0.02),
    KeyEntry("attention_dropout", "attention_dropout", 0.0),
)
SILU = {"silu": "swiglu"}
TIED = KeyEntry("tie_word_embeddings", "tie_embeddings", False)


def decoder_entries(norm_eps: float = 1e-6, hidden_act: Mapping[str, str] = SILU) -> tuple[ConfigEntry, ...]:
    """Return the entries of Llama and models of its architecture.

    `norm_eps` and the first of `hidden_act` are what transformers takes for absent ones.
    """
    return (
        *SIZES,
        TIED,
        KeyEntry("hidden_act", "activation", next(iter(hidden_act)), hidden_act),
        KeyEntry("rms_norm_eps", "norm_eps", norm_eps),
        FixedFieldsEntry({"norm": "rmsnorm", "position": "rope"}),
    )


DECODER = decoder_entries()


def gemma_entries() -> tuple[ConfigEntry, ...]:
    """Return the entries that Gemma 2 and 3 share."""
    return (
        *SIZES,
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("hidden_activation", "activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu"}),
        KeyEntry("rms_norm_eps", "norm_eps", 1e-6),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        HeadsEntry(kv_default=4, dim_default=256, divisible=True),
        QueryScaleEntry(256),
        FixedFieldsEntry(
            {"norm": "rmsnorm", "position": "rope", "norm_position": "both", "zero_centered_norm": True,
             "scale_embeddings": True, "mlp_bias": False}
        ),
        AllowedValuesEntry({"use_bidirectional_attention": (None, False), "hidden_act": ("gelu_pytorch_tanh",)}),
    )  # fmt: skip


@dataclass(frozen=True)
class QueryScaleEntry:
    """Gemma's integer `query_pre_attn_scalar`: attention scores are divided by its square root."""

    default: int
    covered_keys: frozenset[str] = frozenset({"query_pre_attn_scalar"})
    covered_fields: frozenset[str] = frozenset({"attention_scale"})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return the attention scale if it is not the default."""
        scalar = raw.get("query_pre_attn_scalar", self.default)
        if not scalar > 0:
            raise ConfigMismatchError(f"query_pre_attn_scalar = {scalar} must be more than 0")
        usual = scalar == (raw.get("head_dim") or self.default)
        return {"attention_scale": None if usual else scalar**-0.5}

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the integer whose square root divides the scores."""
        if model.attention_scale is None:
            return {"query_pre_attn_scalar": model.query_key_head_dim}
        scalar = round(model.attention_scale**-2)
        if scalar < 1 or not math.isclose(scalar**-0.5, model.attention_scale, rel_tol=1e-12):
            raise ConfigMismatchError(
                f"attention_scale must be 1 / sqrt(a whole number), not {model.attention_scale!r}"
            )
        return {"query_pre_attn_scalar": scalar}


@dataclass(frozen=True)
class MultiHeadEntry:
    """Multi-head attention without grouped queries: each head has its own key and value, and all heads together are as
    wide as the model.
    """

    covered_keys: frozenset[str] = frozenset({"head_dim"})
    covered_fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim"})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return no fields: these are the defaults; a given head dimension must match."""
        check_head_dim(raw)
        return {}

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return no keys, after checking that the model agrees."""
        if model.key_value_heads != model.num_attention_heads:
            raise ConfigMismatchError(f"num_kv_heads must be num_attention_heads, not {model.key_value_heads}")
        check_head_size(model)
        return {}
