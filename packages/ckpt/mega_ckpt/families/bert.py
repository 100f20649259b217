"""BERT (arXiv:1810.04805), and as Megatron has it: norms before attention and MLP, none of the embeddings (arXiv:1909.08053)."""

from __future__ import annotations

from mega_ckpt.families.encoders import (
    BERT_HEAD,
    CARRIED_BERT,
    LAYER,
    POST_NORMS,
    EncoderFamily,
    bert_entries,
    bert_rules,
)

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
    entries=bert_entries("Bert", norm_position="sum"),
    rules=bert_rules("bert", POST_NORMS, BERT_HEAD),
    carried=CARRIED_BERT,
)

MEGATRON_BERT = EncoderFamily(
    name="megatron-bert",
    architecture="MegatronBertForPreTraining",
    prefix="bert.",
    head=BERT_HEAD["matrix"],
    bias_copy="cls.predictions.decoder.bias",
    buffers=_BUFFERS,
    entries=bert_entries("MegatronBert", norm_position="pre"),
    rules=bert_rules("bert", _PRE_NORMS, BERT_HEAD),
    carried=CARRIED_BERT,
)
