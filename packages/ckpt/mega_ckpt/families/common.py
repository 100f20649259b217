"""Entries that several families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.keys import Entry, Fixed, Heads, Key, MismatchError, Only, Raw
from mega_common.model_config import ModelConfig

# The keys that nearly every decoder has.
SIZES: tuple[Entry, ...] = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "hidden_size"),
    Key("intermediate_size", "ffn_hidden_size"),
    Key("num_hidden_layers", "num_layers"),
    Key("num_attention_heads", "num_attention_heads"),
    Key("max_position_embeddings", "max_position"),
    Key("initializer_range", "init_std", 0.02),
    Key("attention_dropout", "attention_dropout", 0.0),
)
SILU = {"silu": "swiglu"}
TIED = Key("tie_word_embeddings", "tie_embeddings", False)


def decoder(norm_eps: float = 1e-6, hidden_act: Mapping[str, str] = SILU) -> tuple[Entry, ...]:
    """The keys of Llama and everything shaped like it.

    `norm_eps` and the first of `hidden_act` are what transformers takes for absent ones.
    """
    return (
        *SIZES,
        TIED,
        Key("hidden_act", "activation", next(iter(hidden_act)), hidden_act),
        Key("rms_norm_eps", "norm_eps", norm_eps),
        Fixed({"norm": "rmsnorm", "position": "rope"}),
    )


DECODER = decoder()


def gemma() -> tuple[Entry, ...]:
    """What Gemma 2 and 3 share."""
    return (
        *SIZES,
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("hidden_activation", "activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh": "geglu"}),
        Key("rms_norm_eps", "norm_eps", 1e-6),
        Key("attention_bias", "qkv_bias attention_out_bias", False),
        Heads(kv_default=4, dim_default=256, divisible=True),
        QueryScalar(256),
        Fixed(
            {"norm": "rmsnorm", "position": "rope", "norm_position": "both", "zero_centered_norm": True,
             "scale_embeddings": True, "mlp_bias": False}
        ),
        Only({"use_bidirectional_attention": (None, False), "hidden_act": ("gelu_pytorch_tanh",)}),
    )  # fmt: skip


@dataclass(frozen=True)
class QueryScalar:
    """Gemma's `query_pre_attn_scalar`, a whole number: scores are divided by its square root."""

    default: int
    keys: frozenset[str] = frozenset({"query_pre_attn_scalar"})
    fields: frozenset[str] = frozenset({"attention_scale"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The factor, where it is not the usual one."""
        scalar = raw.get("query_pre_attn_scalar", self.default)
        if not scalar > 0:
            raise MismatchError(f"query_pre_attn_scalar = {scalar} must be more than 0")
        usual = scalar == (raw.get("head_dim") or self.default)
        return {"attention_scale": None if usual else scalar**-0.5}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The number whose square root divides."""
        if model.attention_scale is None:
            return {"query_pre_attn_scalar": model.head_size}
        scalar = round(model.attention_scale**-2)
        if scalar < 1 or not math.isclose(scalar**-0.5, model.attention_scale, rel_tol=1e-12):
            raise MismatchError(f"attention_scale must be 1 / sqrt(a whole number), not {model.attention_scale!r}")
        return {"query_pre_attn_scalar": scalar}


@dataclass(frozen=True)
class OwnHeads:
    """Every head has its own key and value, and together they are as wide as the model."""

    keys: frozenset[str] = frozenset({"head_dim"})
    fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Nothing: these are the defaults, and a width that is there must be that."""
        check_head_dim(raw)
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Nothing, when the model agrees."""
        if model.kv_heads != model.num_attention_heads:
            raise MismatchError(f"num_kv_heads must be num_attention_heads, not {model.kv_heads}")
        check_head_size(model)
        return {}


def check_head_dim(raw: Raw) -> None:
    """See that a width of a head, where there is one, is what follows from the others.

    Raises:
        MismatchError: when it is not.
    """
    width, heads, size = (raw.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
    if size is not None and width and heads and size != width // heads:
        raise MismatchError(f"head_dim = {size!r} must be {width // heads}")


def check_head_size(model: ModelConfig) -> None:
    """See that all heads together are as wide as the model.

    Raises:
        MismatchError: when they are not.
    """
    if model.head_size * model.num_attention_heads != model.hidden_size:
        raise MismatchError(f"head_dim must be hidden_size / num_attention_heads, not {model.head_size}")
