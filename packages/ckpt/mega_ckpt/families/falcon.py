"""Falcon (arXiv:2311.16867): attention and MLP side by side, one key and value for all queries, or one for each group.

Its old architecture (7B) has one norm before both, the new one (40B, 180B) one before each, or one by choice (11B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import Family
from mega_ckpt.families.keys import Fixed, Key, MismatchError, Only, Raw, check_head_dim, check_head_size
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow
from mega_common.model_config import ModelConfig

_LAYER, _H = "model.layers.{i}", "transformer.h.{i}"
_QKV = tuple(f"{_LAYER}.self_attn.{name}_proj" for name in "qkv")
_SECOND = f"{_LAYER}.post_attention_layernorm.weight"


@dataclass(frozen=True)
class Architecture:
    """Heads and norms, as the switches of Falcon's two architectures say them."""

    keys: frozenset[str] = frozenset(
        {
            "num_kv_heads",
            "new_decoder_architecture",
            "multi_query",
            "parallel_attn",
            "num_ln_in_parallel_attn",
            "head_dim",
        }
    )
    fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim", "parallel_residual", "shared_norm"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Key/value heads, and whether there is one norm."""
        new, norms = bool(raw.get("new_decoder_architecture")), raw.get("num_ln_in_parallel_attn")
        if not raw.get("parallel_attn", True):
            raise MismatchError("parallel_attn = False is not supported (only True)")
        if norms not in ((None, 1, 2) if new else (None, 1)):
            raise MismatchError(f"num_ln_in_parallel_attn = {norms!r} is not supported")
        check_head_dim(raw)
        single = not new and raw.get("multi_query", True)
        return {
            "num_kv_heads": 1 if single else raw.get("num_kv_heads"),
            "parallel_residual": True,
            "shared_norm": not new or norms == 1,
        }

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The old architecture where it does, else the new one."""
        if not model.parallel_residual:
            raise MismatchError("parallel_residual must be True")
        check_head_size(model)
        new = not model.shared_norm or model.kv_heads not in (1, model.num_attention_heads)
        return {
            "new_decoder_architecture": new,
            "num_ln_in_parallel_attn": (1 if model.shared_norm else 2) if new else None,
            "multi_query": new or model.kv_heads == 1,
            "num_kv_heads": model.kv_heads if new else model.num_attention_heads,  # which the old one does not ask
            "parallel_attn": True,
        }


@dataclass(frozen=True)
class Width:
    """The width of the MLP, four times the model's unless given."""

    keys: frozenset[str] = frozenset({"ffn_hidden_size"})
    fields: frozenset[str] = frozenset({"ffn_hidden_size"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The width."""
        return {"ffn_hidden_size": raw.get("ffn_hidden_size") or 4 * raw.get("hidden_size", 0)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The width."""
        return {"ffn_hidden_size": model.ffn_hidden_size}


def _both(disk: str, *names: str, **more: Any) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{disk}.{kind}", tuple(f"{name}.{kind}" for name in names), **more) for kind in ("weight", "bias")
    )


FALCON = Family(
    name="falcon",
    architecture="FalconForCausalLM",
    prefix="transformer.",
    entries=(
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_size"),
        Key("num_hidden_layers", "num_layers"),
        Key("num_attention_heads", "num_attention_heads"),
        Key("max_position_embeddings", "max_position", 2048),
        Key("initializer_range", "init_std", 0.02),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("hidden_dropout", "residual_dropout", 0.0),
        Key("attention_dropout", "attention_dropout", 0.0),
        Key("activation", "activation", "gelu", {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("bias", "qkv_bias attention_out_bias mlp_bias", False),
        Architecture(),
        Width(),
        Rope(),
        SameWindow(knows=False),
        Only({"alibi": (False, None)}),
        Fixed({"norm": "layernorm", "position": "rope", "qk_norm": False}),
    ),
    rules=(
        Rule("transformer.word_embeddings.weight", ("model.embed_tokens.weight",)),
        *_both(f"{_H}.input_layernorm", f"{_LAYER}.input_layernorm", unless=_SECOND),
        *_both(f"{_H}.ln_attn", f"{_LAYER}.input_layernorm", beside=_SECOND),
        *_both(f"{_H}.ln_mlp", f"{_LAYER}.post_attention_layernorm"),
        *_both(f"{_H}.self_attention.query_key_value", *_QKV, by="kv"),
        *_both(f"{_H}.self_attention.dense", f"{_LAYER}.self_attn.o_proj"),
        *_both(f"{_H}.mlp.dense_h_to_4h", f"{_LAYER}.mlp.up_proj"),
        *_both(f"{_H}.mlp.dense_4h_to_h", f"{_LAYER}.mlp.down_proj"),
        *_both("transformer.ln_f", "model.norm"),
    ),
    carried=frozenset({"classifier_dropout"}),
)  # fmt: skip
