"""Megatron's settings of models that are no plain decoders: BERT and T5, which `args` do not tell from GPT; the tensors do
(`megatron_names.told_by`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.keys import MismatchError, Raw
from mega_ckpt.formats.megatron_entries import Several
from mega_ckpt.formats.pickles import words
from mega_common.model_config import ModelConfig


@dataclass(frozen=True)
class Encoder(Several):
    """BERT: `is_encoder`."""

    keys: frozenset[str] = frozenset({"is_encoder", "bert_binary_head"})
    fields: frozenset[str] = frozenset({"causal", "token_types", "masked_lm", "pooler", "sentence_pairs"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """With the head that tells the order of sentences go two types of segment."""
        if not raw.get("is_encoder"):
            return {}
        pairs = bool(raw.get("bert_binary_head", True))
        types = 2 if pairs else 0
        return {"causal": False, "token_types": types, "masked_lm": {}, "pooler": pairs, "sentence_pairs": pairs}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The switch."""
        return {} if model.causal else {"is_encoder": True, "bert_binary_head": model.sentence_pairs}


@dataclass(frozen=True)
class EncoderDecoder(Several):
    """T5: `is_encoder_decoder`, and the layers of both stacks; a number for each token is added to the logits where the embedding
    is the output matrix. What the decoder's text begins with is no setting of Megatron's: mega's own files say it.
    """

    keys: frozenset[str] = words(
        """is_encoder_decoder encoder_num_layers decoder_num_layers decoder_start_token_id
        relative_attention_num_buckets relative_attention_max_distance"""
    )
    fields: frozenset[str] = frozenset({"num_layers", "encoder", "relative"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Nothing for a model of one stack."""
        if not raw.get("is_encoder_decoder"):
            return {}
        encoder, decoder = raw["encoder_num_layers"], raw["decoder_num_layers"]
        tied, start = not raw.get("untie_embeddings_and_output_weights"), raw.get("decoder_start_token_id", 0)
        out = {
            "num_layers": encoder + decoder,
            "encoder": {"num_layers": encoder, "head_bias": tied, "start_token": start},
        }
        if raw.get("position_embedding_type") != "relative":
            return out
        most, buckets = raw.get("relative_attention_max_distance", 128), raw.get("relative_attention_num_buckets", 32)
        return {**out, "position": "relative", "relative": {"buckets": buckets, "max_distance": most}}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The numbers; that of the decoder's layers is Megatron's `num_layers`."""
        encoder = model.encoder
        if encoder is None:
            return {}
        if model.kv_heads != model.num_attention_heads:
            raise MismatchError(f"num_kv_heads must be {model.num_attention_heads}: its T5 has no others")
        if encoder.head_bias != model.tie_embeddings:
            raise MismatchError(f"encoder.head_bias must be {model.tie_embeddings}, as tie_embeddings")
        if model.position == "relative" and model.relative.every_layer:
            raise MismatchError("relative.every_layer must be False")
        decoder = model.num_layers - encoder.num_layers
        return {
            "is_encoder_decoder": True, "num_layers": decoder, "encoder_num_layers": encoder.num_layers,
            "decoder_num_layers": decoder, "decoder_start_token_id": encoder.start_token,
            "relative_attention_num_buckets": model.relative.buckets,
            "relative_attention_max_distance": model.relative.max_distance,
        }  # fmt: skip
