"""Decoders with ALiBi (arXiv:2108.12409) instead of positions: BLOOM (arXiv:2211.05100), with biases and a norm of the
embeddings, and MPT (MosaicML), without any bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    MultiHeadEntry,
)
from mega_ckpt.families.disk_layouts import LAYER, QKV, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.gpt2_decoders import FourfoldFfnWidthConfigEntry
from mega_ckpt.families.window_entries import UniformWindowEntry
from mega_common.model_config import ModelConfig

_BLOCK = "transformer.h.{i}"

BLOOM = ModelFamily(
    name="bloom",
    architecture="BloomForCausalLM",
    prefix="transformer.",
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size n_embed", "hidden_size"),
        KeyEntry("n_layer num_hidden_layers", "num_layers"),
        KeyEntry("n_head num_attention_heads", "num_attention_heads"),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("hidden_dropout", "residual_dropout", 0.0),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("seq_length max_position_embeddings", "max_position", 2048),
        FourfoldFfnWidthConfigEntry(),
        MultiHeadEntry(),
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry({"apply_residual_connection_post_layernorm": (False,)}),
        FixedFieldsEntry(
            {"norm": "layernorm", "position": "alibi", "embedding_norm": True, "activation": "gelu_tanh", "qkv_bias": True,
             "attention_out_bias": True, "mlp_bias": True, "qk_norm": False}
        ),
    ),
    rules=(
        TensorRule("transformer.word_embeddings.weight", ("model.embed_tokens.weight",)),
        *weight_bias_rules("transformer.word_embeddings_layernorm", "model.embed_norm"),
        *weight_bias_rules(f"{_BLOCK}.input_layernorm", f"{LAYER}.input_layernorm"),
        *weight_bias_rules(f"{_BLOCK}.self_attention.query_key_value", *QKV, per_head="kv"),
        *weight_bias_rules(f"{_BLOCK}.self_attention.dense", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{_BLOCK}.post_attention_layernorm", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{_BLOCK}.mlp.dense_h_to_4h", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{_BLOCK}.mlp.dense_4h_to_h", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules("transformer.ln_f", "model.norm"),
    ),
    carried=frozenset({"classifier_dropout", "slow_but_exact", "masked_softmax_fusion", "attention_softmax_in_fp32", "bias_dropout_fusion"}),
)  # fmt: skip


@dataclass(frozen=True)
class MptAttentionEntry:
    """Translation to and from config.json of MPT's `attn_config`: score scale, and one rate for both dropouts."""

    handled_config_keys: frozenset[str] = frozenset({"attn_config"})
    handled_model_fields: frozenset[str] = frozenset({"attention_scale", "attention_dropout", "residual_dropout"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return score scale and dropouts as `ModelConfig` fields; ConfigMismatchError for attention that is not supported.

        Raises:
            ConfigMismatchError: for clipped or normalized queries and keys, prefixes, other slopes, and no ALiBi.
        """
        given = raw.get("attn_config") or {}
        _MPT_FIXED.fields_from_config(given)
        dropout = float(given.get("attn_pdrop", 0.0))
        return {
            "attention_scale": given.get("softmax_scale"), "attention_dropout": dropout, "residual_dropout": dropout,
        }  # fmt: skip

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json section `attn_config`; ConfigMismatchError if the two dropouts differ."""
        if model.attention_dropout != model.residual_dropout:
            raise ConfigMismatchError("attention_dropout and residual_dropout must be equal")
        whole = int(model.attention_dropout)  # which transformers requires of 0
        dropout = whole if whole == model.attention_dropout else model.attention_dropout
        return {"attn_config": {"attn_pdrop": dropout, "softmax_scale": model.attention_scale}}


_MPT_BLOCK = "transformer.blocks.{i}"
_MPT_FIXED = AllowedValuesEntry(
    {"attn_type": ("multihead_attention",), "clip_qkv": (None,), "prefix_lm": (False,), "qk_ln": (False,),
     "attn_uses_sequence_id": (False,), "alibi": (True,), "alibi_bias_max": (8,)}
)  # fmt: skip

MPT = ModelFamily(
    name="mpt",
    architecture="MptForCausalLM",
    prefix="transformer.",
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("d_model hidden_size", "hidden_size"),
        KeyEntry("n_layers num_hidden_layers", "num_layers"),
        KeyEntry("n_heads num_attention_heads", "num_attention_heads"),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("emb_pdrop", "embedding_dropout", 0.0),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        KeyEntry("max_seq_len", "max_position", 2048),
        MptAttentionEntry(),
        FourfoldFfnWidthConfigEntry(),
        MultiHeadEntry(),
        UniformWindowEntry(supports_windows=False),
        AllowedValuesEntry(
            {"expansion_ratio": (4,), "no_bias": (True,), "logit_scale": (None,), "embedding_fraction": (1.0,),
             "norm_type": ("low_precision_layernorm", "layernorm")}
        ),
        FixedFieldsEntry(
            {"norm": "layernorm", "norm_bias": False, "position": "alibi", "embedding_norm": False, "activation": "gelu",
             "qkv_bias": False, "attention_out_bias": False, "mlp_bias": False, "qk_norm": False}
        ),
    ),
    rules=(
        TensorRule("transformer.wte.weight", ("model.embed_tokens.weight",)),
        TensorRule(f"{_MPT_BLOCK}.norm_1.weight", (f"{LAYER}.input_layernorm.weight",)),
        TensorRule(f"{_MPT_BLOCK}.attn.Wqkv.weight", tuple(f"{name}.weight" for name in QKV)),
        TensorRule(f"{_MPT_BLOCK}.attn.out_proj.weight", (f"{LAYER}.self_attn.o_proj.weight",)),
        TensorRule(f"{_MPT_BLOCK}.norm_2.weight", (f"{LAYER}.post_attention_layernorm.weight",)),
        TensorRule(f"{_MPT_BLOCK}.ffn.up_proj.weight", (f"{LAYER}.mlp.up_proj.weight",)),
        TensorRule(f"{_MPT_BLOCK}.ffn.down_proj.weight", (f"{LAYER}.mlp.down_proj.weight",)),
        TensorRule("transformer.norm_f.weight", ("model.norm.weight",)),
    ),
    carried=frozenset({"learned_pos_emb", "resid_pdrop", "classifier_dropout", "hidden_dropout", "init_device", "max_position_embeddings", "init_config", "verbose", "tokenizer_name"}),
)  # fmt: skip
