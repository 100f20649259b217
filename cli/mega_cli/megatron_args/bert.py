"""What `pretrain_bert.py` makes of the flags that it shares with `pretrain_gpt.py`: an encoder, its heads and its data."""

from __future__ import annotations

from mega_cli.megatron_args.draft import Draft
from mega_cli.megatron_args.launch import BERT


def bert_section(draft: Draft) -> None:
    """The keys of `model:` and `data:` that only an encoder has."""
    if draft.program != BERT:
        return
    put, why = draft.put, f"{BERT} trains an encoder"
    pairs = draft["bert_binary_head"]
    put("model.causal", False, because=why)
    put("model.masked_lm.activation", "gelu", because=why)
    put("data.kind", "bert", because=why)
    for key in ("model.pooler", "model.sentence_pairs", "data.bert.sentence_pairs"):
        put(key, pairs, "bert_binary_head")
    put("model.token_types", 2 if pairs else 0, "bert_binary_head")
    put("data.bert.mask_probability", draft["mask_prob"], "mask_prob")
    put("data.bert.short_probability", draft["short_seq_prob"], "short_seq_prob")
