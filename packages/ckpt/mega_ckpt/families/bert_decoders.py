"""Decoders with an encoder's architecture. ModernBERT decoder (Ettin, arXiv:2507.11412): ModernBERT with causal attention and the transform
of its masked-language-model head before the output layer. BERT for generation (arXiv:1907.12461): BERT with causal attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.bert_encoders import (
    HEAD_ACTIVATIONS,
    MODERNBERT,
    POST_NORMS,
    EncoderHeadsEntry,
    TokenTypesEntry,
    bert_config_entries,
    bert_tensor_rules,
)
from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    layer_indices,
)
from mega_ckpt.families.disk_layouts import LAYER, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.window_entries import (
    build_sliding_window_fields,
    build_window_layer_types,
    get_transformers_layer_types,
)
from mega_common.model_config import ModelConfig


@dataclass(frozen=True)
class CausalLocalAttentionEntry:
    """Translation to and from config.json of the sliding windows of ModernBERT's decoder.
    A window has half of `local_attention` keys before a query.
    """

    handled_config_keys: frozenset[str] = frozenset(
        {"local_attention", "layer_types", "global_attn_every_n_layers", "sliding_window"}
    )
    handled_model_fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of sliding windows from config.json; ConfigMismatchError if its window sizes conflict.

        Raises:
            ConfigMismatchError: if `sliding_window` differs from half of `local_attention`.
        """
        layers, every = layer_indices(raw), raw.get("global_attn_every_n_layers", 3)
        size = (raw.get("local_attention", 128) or 0) // 2
        if raw.get("sliding_window", size) not in (size, None):
            raise ConfigMismatchError(f"sliding_window = {raw['sliding_window']!r} must be {size}")
        kinds = raw.get("layer_types") or build_window_layer_types([layer % every == 0 for layer in layers])
        return build_sliding_window_fields(kinds, size, layers)

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys `local_attention` and `layer_types`."""
        size = 128 if model.sliding_window is None else 2 * model.sliding_window
        return {"local_attention": size, "layer_types": get_transformers_layer_types(model)}


@dataclass(frozen=True)
class ModernBertDecoderHeadConfigEntry:
    """Translation to and from config.json of the transform before the output layer of ModernBERT's decoder.
    Classifiers are not supported.
    """

    handled_config_keys: frozenset[str] = frozenset({"classifier_activation", "classifier_bias", "decoder_bias"})
    handled_model_fields: frozenset[str] = frozenset({"masked_lm"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `masked_lm`; ConfigMismatchError for a classifier or another activation."""
        if str(raw.get("architectures")).endswith("ForSequenceClassification']"):
            raise ConfigMismatchError("architectures: ForSequenceClassification is not supported (only ForCausalLM)")
        activation = raw.get("classifier_activation", "gelu")
        if activation not in HEAD_ACTIVATIONS:
            raise ConfigMismatchError(f"classifier_activation = {activation!r} is not supported")
        biases = {"dense_bias": raw.get("classifier_bias", False), "bias": raw.get("decoder_bias", True)}
        return {"masked_lm": {"activation": HEAD_ACTIVATIONS[activation], **biases}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of the transform before the output layer; ConfigMismatchError without one, or with a task head."""
        head = model.masked_lm
        if head is None or not head.dense or model.score or model.task_head:
            raise ConfigMismatchError("masked_lm with dense: true is required, without score and task_head")
        activation = next(key for key, value in HEAD_ACTIVATIONS.items() if value == head.activation)
        return {"classifier_activation": activation, "classifier_bias": head.dense_bias, "decoder_bias": head.bias}


_REPLACED = {"sliding_window", "masked_lm"}
MODERNBERT_DECODER = ModelFamily(
    name="modernbert-decoder",
    architecture="ModernBertDecoderForCausalLM",
    head="decoder.weight",
    entries=(
        *(
            entry
            for entry in MODERNBERT.entries
            if not entry.handled_model_fields & _REPLACED and not isinstance(entry, FixedFieldsEntry | AllowedValuesEntry)
        ),
        CausalLocalAttentionEntry(),
        ModernBertDecoderHeadConfigEntry(),
        FixedFieldsEntry({
            "causal": True, "norm": "layernorm", "position": "rope", "norm_position": "pre", "first_norm": False, "embedding_norm": True,
            "qk_norm": False,
        }),
    ),
    rules=(
        *(rule for rule in MODERNBERT.rules if ".attn.W" not in rule.disk and "head." not in rule.disk),
        *(rule for x in "qkv" for rule in weight_bias_rules(f"{LAYER}.attn.{x}_proj", f"{LAYER}.self_attn.{x}_proj")),
        *weight_bias_rules(f"{LAYER}.attn.Wo", f"{LAYER}.self_attn.o_proj"),
    ),
    carried=MODERNBERT.carried,
)  # fmt: skip


@dataclass(frozen=True)
class CausalDecoderEntry:
    """Translation to and from config.json of `is_decoder`, which must be true: attention is causal.
    Without the key, the class for generation has bidirectional attention.
    """

    handled_config_keys: frozenset[str] = frozenset({"is_decoder"})
    handled_model_fields: frozenset[str] = frozenset({"causal"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `causal`; ConfigMismatchError for an encoder."""
        if raw.get("is_decoder", False) is not True:
            raise ConfigMismatchError("is_decoder: true is missing (without it, attention is bidirectional)")
        return {"causal": True}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return `{"is_decoder": True}` for config.json; ConfigMismatchError for a model without causal attention."""
        if not model.causal:
            raise ConfigMismatchError("causal must be True")
        return {"is_decoder": True}


_HEAD = {
    "dense": "lm_head.dense",
    "norm": "lm_head.norm",
    "bias": "lm_head.bias",
    "matrix": "lm_head.decoder.weight",
}
BERT_GENERATION = ModelFamily(
    name="bert-generation",
    architecture="BertGenerationDecoder",
    prefix="bert.",
    head=_HEAD["matrix"],
    entries=(
        *(
            entry
            for entry in bert_config_entries("BertGeneration", norm_position="sum")
            if not isinstance(entry, FixedFieldsEntry | AllowedValuesEntry | EncoderHeadsEntry | TokenTypesEntry)
        ),
        CausalDecoderEntry(),
        # an untied output of transformers has another bias, and ignores this one
        AllowedValuesEntry({"tie_word_embeddings": (True,), "sliding_window": (None,), "layer_types": (None,)}),
        FixedFieldsEntry({
            "tie_embeddings": True, "norm": "layernorm", "norm_position": "sum", "embedding_norm": True, "position": "learned", "qkv_bias": True,
            "attention_out_bias": True, "mlp_bias": True, "qk_norm": False, "head_bias": True,
        }),
    ),
    rules=bert_tensor_rules("bert", POST_NORMS, _HEAD),
    buffers=r"(bert\.)?embeddings\.position_ids|lm_head\.decoder\.bias",
)  # fmt: skip
