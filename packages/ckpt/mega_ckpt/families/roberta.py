"""RoBERTa (arXiv:1907.11692): BERT without pairs of sentences, its positions behind that of padding."""

from __future__ import annotations

from mega_ckpt.families.encoders import (
    CARRIED_BERT,
    POST_NORMS,
    EncoderFamily,
    OffsetPositions,
    bert_entries,
    bert_rules,
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
    entries=bert_entries("Roberta", norm_position="sum", positions=OffsetPositions(), activation="gelu"),
    rules=bert_rules("roberta", POST_NORMS, _HEAD),
    carried=CARRIED_BERT,
)
