"""GPT-2 (Radford et al. 2019), with linear layers stored (in, out) and fused query-key-value; GPT-BigCode: SantaCoder
and StarCoder (arXiv:2305.06161).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    MultiHeadEntry,
    check_head_dim,
    check_head_size,
)
from mega_ckpt.families.disk_layouts import LAYER, PLAIN, QKV, TRANSPOSED, DiskLayout, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.window_entries import UniformWindowEntry
from mega_common.model_config import ModelConfig

_H = "transformer.h.{i}"


@dataclass(frozen=True)
class Gpt2SizesEntry:
    """Config entry for GPT-2's MLP width `n_inner`, four times the hidden size by default, and for `n_ctx`, a second
    key for the maximum sequence length.
    """

    handled_config_keys: frozenset[str] = frozenset({"n_inner", "n_ctx"})
    handled_model_fields: frozenset[str] = frozenset({"ffn_hidden_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `ffn_hidden_size`; ConfigMismatchError if `n_ctx`, an older
        name of `n_positions`, differs from it.
        """
        if raw.get("n_ctx", raw.get("n_positions")) != raw.get("n_positions"):
            raise ConfigMismatchError(f"n_ctx = {raw['n_ctx']!r} differs from n_positions = {raw.get('n_positions')!r}")
        return {"ffn_hidden_size": raw.get("n_inner") or 4 * raw.get("n_embd", 0)}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json key `n_inner` (null for the default width), without `n_ctx`."""
        return {"n_inner": None if model.ffn_hidden_size == 4 * model.hidden_size else model.ffn_hidden_size}


def gpt2_config_entries(activation: str) -> tuple[ConfigEntry, ...]:
    """Return the config entries that GPT-2 and GPT-BigCode share; `activation` is transformers' default activation
    function.
    """
    return (
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("n_embd hidden_size", "hidden_size"),
        KeyEntry("n_layer num_hidden_layers", "num_layers"),
        KeyEntry("n_head num_attention_heads", "num_attention_heads"),
        KeyEntry("n_positions max_position_embeddings", "max_position"),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry(
            "activation_function",
            "activation",
            activation,
            {activation: "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
        ),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("embd_pdrop", "embedding_dropout", 0.1),
        KeyEntry("attn_pdrop", "attention_dropout", 0.1),
        KeyEntry("resid_pdrop", "residual_dropout", 0.1),
        KeyEntry("initializer_range", "init_std", 0.02),
        Gpt2SizesEntry(),
        UniformWindowEntry(supports_windows=False),
        FixedFieldsEntry(
            {
                "norm": "layernorm",
                "position": "learned",
                "qkv_bias": True,
                "attention_out_bias": True,
                "mlp_bias": True,
                "qk_norm": False,
            }
        ),
    )


def gpt2_tensor_rules(layout: DiskLayout, *, per_head: str = "") -> tuple[TensorRule, ...]:
    """Return the tensor rules that GPT-2 and GPT-BigCode share: `layout` is the layout of linear layers, `per_head` the
    kind of heads by which queries, keys and values are interleaved.
    """
    return (
        TensorRule("transformer.wte.weight", ("model.embed_tokens.weight",)),
        TensorRule("transformer.wpe.weight", ("model.embed_positions.weight",)),
        *weight_bias_rules(f"{_H}.ln_1", f"{LAYER}.input_layernorm"),
        *weight_bias_rules(f"{_H}.attn.c_attn", *QKV, layout=layout, per_head=per_head),
        *weight_bias_rules(f"{_H}.attn.c_proj", f"{LAYER}.self_attn.o_proj", layout=layout),
        *weight_bias_rules(f"{_H}.ln_2", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{_H}.mlp.c_fc", f"{LAYER}.mlp.up_proj", layout=layout),
        *weight_bias_rules(f"{_H}.mlp.c_proj", f"{LAYER}.mlp.down_proj", layout=layout),
        *weight_bias_rules("transformer.ln_f", "model.norm"),
    )


GPT2 = ModelFamily(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    entries=(
        *gpt2_config_entries(activation="gelu_new"),
        MultiHeadEntry(),
        AllowedValuesEntry({"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
              "reorder_and_upcast_attn": (False, True)}),
    ),
    rules=gpt2_tensor_rules(TRANSPOSED),
    carried=frozenset(
        {"classifier_dropout", "hidden_dropout", "summary_activation", "summary_first_dropout", "summary_last_dropout",
         "summary_proj_to_labels", "summary_type", "summary_use_proj"}
    ),
)  # fmt: skip


@dataclass(frozen=True)
class MultiQueryEntry:
    """Config entry for GPT-BigCode's key `multi_query`, which selects multi-query or multi-head attention."""

    handled_config_keys: frozenset[str] = frozenset({"multi_query", "head_dim"})
    handled_model_fields: frozenset[str] = frozenset({"num_kv_heads", "head_dim"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` field `num_kv_heads`: 1 for multi-query attention, else None (as
        many as query heads).
        """
        check_head_dim(raw)
        return {"num_kv_heads": 1 if raw.get("multi_query", True) else None}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json key `multi_query`; ConfigMismatchError for grouped-query attention."""
        if model.key_value_heads not in (1, model.num_attention_heads):
            raise ConfigMismatchError(f"num_kv_heads must be 1 or num_attention_heads, not {model.key_value_heads}")
        check_head_size(model)
        return {"multi_query": model.key_value_heads == 1}


GPT_BIGCODE = ModelFamily(
    name="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    prefix="transformer.",
    buffers=r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    entries=(
        *gpt2_config_entries(activation="gelu_pytorch_tanh"),
        MultiQueryEntry(),
        AllowedValuesEntry({"scale_attn_weights": (True,)}),
    ),
    rules=gpt2_tensor_rules(PLAIN, per_head="kv"),
    carried=frozenset(
        {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "classifier_dropout", "hidden_dropout"}
    ),
)
