"""Encoders of the BERT kind. BERT (arXiv:1810.04805), and Megatron's with pre-norms and no embedding norm
(arXiv:1909.08053). RoBERTa (arXiv:1907.11692): BERT without sentence pairs, positions after the padding position.
ModernBERT (arXiv:2412.13663): pre-norms except before the first attention, bidirectional windows in two of three
layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.common_entries import MultiHeadEntry
from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    HfConfigDict,
    KeyEntry,
)
from mega_ckpt.families.disk_layouts import TensorRule
from mega_ckpt.families.encoder_family import (
    BERT_HEAD,
    CARRIED_BERT,
    GELUS,
    LAYER,
    OUTPUT_BIAS,
    POST_NORMS,
    EncoderFamily,
    LocalAttentionEntry,
    OffsetPositionsEntry,
    bert_config_entries,
    bert_tensor_rules,
    encoder_class_name,
    weight_bias_rules,
)
from mega_ckpt.families.rope_entries import GlobalLocalRopeEntry, RopeEntry
from mega_common.model_config import MaskedLmConfig, ModelConfig

_BUFFERS = r"(bert\.)?embeddings\.position_ids"
_PRE_NORMS = {
    "encoder.layer.{i}.attention.ln": f"{LAYER}.input_layernorm",
    "encoder.layer.{i}.ln": f"{LAYER}.post_attention_layernorm",
    "encoder.ln": "model.norm",
}

BERT = EncoderFamily(
    name="bert",
    architecture="BertForPreTraining",
    prefix="bert.",
    head=BERT_HEAD["matrix"],
    bias_copy="cls.predictions.decoder.bias",
    buffers=_BUFFERS,
    entries=bert_config_entries("Bert", norm_position="sum"),
    rules=bert_tensor_rules("bert", POST_NORMS, BERT_HEAD),
    carried=CARRIED_BERT,
)

MEGATRON_BERT = EncoderFamily(
    name="megatron-bert",
    architecture="MegatronBertForPreTraining",
    prefix="bert.",
    head=BERT_HEAD["matrix"],
    bias_copy="cls.predictions.decoder.bias",
    buffers=_BUFFERS,
    entries=bert_config_entries("MegatronBert", norm_position="pre"),
    rules=bert_tensor_rules("bert", _PRE_NORMS, BERT_HEAD),
    carried=CARRIED_BERT,
)


_HEAD = {
    "dense": "lm_head.dense",
    "norm": "lm_head.layer_norm",
    "bias": "lm_head.bias",
    "matrix": "lm_head.decoder.weight",
}

ROBERTA = EncoderFamily(
    name="roberta",
    architecture="RobertaForMaskedLM",
    prefix="roberta.",
    head=_HEAD["matrix"],
    bias_copy="lm_head.decoder.bias",
    buffers=r"(roberta\.)?embeddings\.position_ids",
    entries=bert_config_entries("Roberta", norm_position="sum", positions=OffsetPositionsEntry(), activation="gelu"),
    rules=bert_tensor_rules("roberta", POST_NORMS, _HEAD),
    carried=CARRIED_BERT,
)


_DISK = "model.layers.{i}"
_QKV = tuple(f"{LAYER}.self_attn.{name}_proj" for name in "qkv")


@dataclass(frozen=True)
class _ModernBertHeadEntry:
    """ModernBERT's masked-language-model head; its keys are named after classifiers."""

    covered_keys: frozenset[str] = frozenset({"classifier_activation", "classifier_bias", "decoder_bias"})
    covered_fields: frozenset[str] = frozenset({"masked_lm", "pooler", "sentence_pairs"})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return the head, whatever the class: `restrict_to_stored` checks the tensors."""
        activation = raw.get("classifier_activation", "gelu")
        if activation not in GELUS:
            raise ConfigMismatchError(
                f"classifier_activation = {activation!r} is not supported (only {', '.join(GELUS)})"
            )
        biases = {"dense_bias": raw.get("classifier_bias", False), "bias": raw.get("decoder_bias", True)}
        return {"masked_lm": {"activation": GELUS[activation], **biases}}

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys and the class."""
        if model.pooler:
            raise ConfigMismatchError("pooler must be False")
        head = model.masked_lm or MaskedLmConfig(dense_bias=False)
        return {
            "architectures": [encoder_class_name("ModernBert", model)],
            "classifier_activation": next(there for there, here in GELUS.items() if here == head.activation),
            "classifier_bias": head.dense_bias,
            "decoder_bias": head.bias,
        }


MODERNBERT = EncoderFamily(
    name="modernbert",
    architecture="ModernBertForMaskedLM",
    head="decoder.weight",
    entries=(
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size", "hidden_size"),
        KeyEntry("intermediate_size", "ffn_hidden_size"),
        KeyEntry("num_hidden_layers", "num_layers"),
        KeyEntry("num_attention_heads", "num_attention_heads"),
        KeyEntry("max_position_embeddings", "max_position", 8192),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("hidden_activation", "activation", "gelu",
            {"gelu": "geglu_erf", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "silu": "swiglu"}),
        KeyEntry("norm_eps", "norm_eps", 1e-5),
        KeyEntry("norm_bias", "norm_bias", False),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        KeyEntry("embedding_dropout", "embedding_dropout", 0.0),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        GlobalLocalRopeEntry(
            RopeEntry(theta=160_000.0, theta_key="global_rope_theta", scalings=frozenset({"none"})),
            RopeEntry(scalings=frozenset({"none"})),
            local_key="local_rope_theta",
        ),
        LocalAttentionEntry(),
        MultiHeadEntry(),
        _ModernBertHeadEntry(),
        AllowedValuesEntry({"position_embedding_type": ("absolute",), "sliding_window": (None,)}),
        FixedFieldsEntry({"causal": False, "norm": "layernorm", "position": "rope", "norm_position": "pre", "first_norm": False,
               "embedding_norm": True, "qk_norm": False, "token_types": 0}),
    ),
    rules=(
        TensorRule("model.embeddings.tok_embeddings.weight", ("model.embed_tokens.weight",)),
        *weight_bias_rules("model.embeddings.norm", "model.embed_norm"),
        *weight_bias_rules(f"{_DISK}.attn_norm", f"{LAYER}.input_layernorm"),
        *weight_bias_rules(f"{_DISK}.attn.Wqkv", *_QKV),
        *weight_bias_rules(f"{_DISK}.attn.Wo", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{_DISK}.mlp_norm", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{_DISK}.mlp.Wi", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{_DISK}.mlp.Wo", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules("model.final_norm", "model.norm"),
        *weight_bias_rules("head.dense", "lm_head.dense"),
        *weight_bias_rules("head.norm", "lm_head.norm"),
        TensorRule("decoder.bias", (OUTPUT_BIAS,)),
        TensorRule("decoder.weight", ("lm_head.weight",)),
    ),
    carried=frozenset(
        {"classifier_dropout", "classifier_pooling", "deterministic_flash_attn", "initializer_cutoff_factor",
         "layer_norm_eps", "mlp_dropout", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index",
         "sparse_prediction"}
    ),
)  # fmt: skip
