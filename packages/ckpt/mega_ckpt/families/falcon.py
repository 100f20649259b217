"""Falcon (arXiv:2311.16867): parallel attention and MLP, with multi-query or grouped-query attention.

Its old architecture (7B) has one norm before both, the new one (40B, 180B) one before each, or one by choice (11B).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    HfConfigDict,
    KeyEntry,
    check_head_dim,
    check_head_size,
)
from mega_ckpt.families.disk_layouts import TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import UniformWindowEntry
from mega_common.model_config import ModelConfig

_LAYER, _H = "model.layers.{i}", "transformer.h.{i}"
_QKV = tuple(f"{_LAYER}.self_attn.{name}_proj" for name in "qkv")
_SECOND = f"{_LAYER}.post_attention_layernorm.weight"


@dataclass(frozen=True)
class FalconArchitectureEntry:
    """Heads and norms, from the switches of Falcon's two architectures."""

    covered_keys: frozenset[str] = frozenset(
        {
            "num_kv_heads",
            "new_decoder_architecture",
            "multi_query",
            "parallel_attn",
            "num_ln_in_parallel_attn",
            "head_dim",
        }
    )
    covered_fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim", "parallel_residual", "shared_norm"})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return the number of key/value heads and whether there is one shared norm."""
        new, norms = bool(raw.get("new_decoder_architecture")), raw.get("num_ln_in_parallel_attn")
        if not raw.get("parallel_attn", True):
            raise ConfigMismatchError("parallel_attn = False is not supported (only True)")
        if norms not in ((None, 1, 2) if new else (None, 1)):
            raise ConfigMismatchError(f"num_ln_in_parallel_attn = {norms!r} is not supported")
        check_head_dim(raw)
        single = not new and raw.get("multi_query", True)
        return {
            "num_kv_heads": 1 if single else raw.get("num_kv_heads"),
            "parallel_residual": True,
            "shared_norm": not new or norms == 1,
        }

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the switches of the old architecture if it can express the model, else of the new one."""
        if not model.parallel_residual:
            raise ConfigMismatchError("parallel_residual must be True")
        check_head_size(model)
        new = not model.shared_norm or model.key_value_heads not in (1, model.num_attention_heads)
        return {
            "new_decoder_architecture": new,
            "num_ln_in_parallel_attn": (1 if model.shared_norm else 2) if new else None,
            "multi_query": new or model.key_value_heads == 1,
            "num_kv_heads": model.key_value_heads
            if new
            else model.num_attention_heads,  # which the old one does not ask
            "parallel_attn": True,
        }


@dataclass(frozen=True)
class FalconWidthEntry:
    """Width of the MLP, four times the model's by default."""

    covered_keys: frozenset[str] = frozenset({"ffn_hidden_size"})
    covered_fields: frozenset[str] = frozenset({"ffn_hidden_size"})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return the width."""
        return {"ffn_hidden_size": raw.get("ffn_hidden_size") or 4 * raw.get("hidden_size", 0)}

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the width."""
        return {"ffn_hidden_size": model.ffn_hidden_size}


def _weight_bias_rules(disk: str, *names: str, **more: Any) -> tuple[TensorRule, ...]:
    return tuple(
        TensorRule(f"{disk}.{kind}", tuple(f"{name}.{kind}" for name in names), **more) for kind in ("weight", "bias")
    )


FALCON = ModelFamily(
    name="falcon",
    architecture="FalconForCausalLM",
    prefix="transformer.",
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size", "hidden_size"),
        KeyEntry("num_hidden_layers", "num_layers"),
        KeyEntry("num_attention_heads", "num_attention_heads"),
        KeyEntry("max_position_embeddings", "max_position", 2048),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry("hidden_dropout", "residual_dropout", 0.0),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        KeyEntry("activation", "activation", "gelu", {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("bias", "qkv_bias attention_out_bias mlp_bias", False),
        FalconArchitectureEntry(),
        FalconWidthEntry(),
        RopeEntry(),
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry({"alibi": (False, None)}),
        FixedFieldsEntry({"norm": "layernorm", "position": "rope", "qk_norm": False}),
    ),
    rules=(
        TensorRule("transformer.word_embeddings.weight", ("model.embed_tokens.weight",)),
        *_weight_bias_rules(f"{_H}.input_layernorm", f"{_LAYER}.input_layernorm", unless=_SECOND),
        *_weight_bias_rules(f"{_H}.ln_attn", f"{_LAYER}.input_layernorm", beside=_SECOND),
        *_weight_bias_rules(f"{_H}.ln_mlp", f"{_LAYER}.post_attention_layernorm"),
        *_weight_bias_rules(f"{_H}.self_attention.query_key_value", *_QKV, by="kv"),
        *_weight_bias_rules(f"{_H}.self_attention.dense", f"{_LAYER}.self_attn.o_proj"),
        *_weight_bias_rules(f"{_H}.mlp.dense_h_to_4h", f"{_LAYER}.mlp.up_proj"),
        *_weight_bias_rules(f"{_H}.mlp.dense_4h_to_h", f"{_LAYER}.mlp.down_proj"),
        *_weight_bias_rules("transformer.ln_f", "model.norm"),
    ),
    carried=frozenset({"classifier_dropout"}),
)  # fmt: skip
