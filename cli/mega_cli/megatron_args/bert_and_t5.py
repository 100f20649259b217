"""Sections of run.yaml for `pretrain_bert.py` (encoder, heads, data) and `pretrain_t5.py` (encoder and decoder)."""

from __future__ import annotations

from mega_cli.megatron_args.run_draft import RunYamlDraft
from mega_cli.megatron_args.training_command import BERT, T5


def translate_bert_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the keys of `model` and `data` that only an encoder has, if the script runs `pretrain_bert.py`."""
    if draft.program != BERT:
        return
    put, why = draft.set_key, f"{BERT} trains an encoder"
    pairs = draft["bert_binary_head"]
    put("model.causal", False, because=why)
    put("model.masked_lm.activation", "gelu", because=why)
    put("data.kind", "bert", because=why)
    for key in ("model.pooler", "model.sentence_pairs", "data.bert.sentence_pairs"):
        put(key, pairs, "bert_binary_head")
    put("model.token_types", 2 if pairs else 0, "bert_binary_head")
    put("data.bert.mask_probability", draft["mask_prob"], "mask_prob")
    put("data.bert.short_probability", draft["short_seq_prob"], "short_seq_prob")


def is_t5_script(draft: RunYamlDraft) -> bool:
    """Return whether the launch script trains T5, which is decided by the name of its program, `pretrain_t5.py`."""
    return draft.program == T5


def count_t5_layers(draft: RunYamlDraft) -> int | None:
    """Return the total layers of T5's encoder and decoder by Megatron's flags; None if a number is unknown.
    Each has `--num-layers` layers, unless one has its own flag.
    """
    encoder = draft["encoder_num_layers"] or draft["num_layers"]
    decoder = draft["decoder_num_layers"] or draft["num_layers"] or encoder
    return encoder + decoder if encoder and decoder else None


def translate_t5_flags(draft: RunYamlDraft) -> None:
    """Add to `draft` the keys of `model` and `data` of a run.yaml that only an encoder-decoder model (T5) has."""
    put, tied = draft.set_key, not draft["untie_embeddings_and_output_weights"]
    flags = ("encoder_num_layers", "decoder_num_layers")
    put("model.encoder.num_layers", draft["encoder_num_layers"] or draft["num_layers"], "num_layers", *flags)
    put("model.encoder.head_bias", tied, because="Megatron's T5 has one with tied embeddings")
    if draft["position_embedding_type"] == "relative":
        put("model.relative.buckets", draft["relative_attention_num_buckets"], "relative_attention_num_buckets")
        put("model.relative.max_distance", draft["relative_attention_max_distance"], "relative_attention_max_distance")
    put("data.kind", "t5", because="the data of pretrain_t5.py")
    put("data.t5.decoder_seq_length", draft["decoder_seq_length"], "decoder_seq_length")
    put("data.t5.mask_probability", draft["mask_prob"], "mask_prob")
    put("data.t5.short_probability", draft["short_seq_prob"], "short_seq_prob")
    text = "the tokenizer must have the sentinels <extra_id_0>, <extra_id_1>, ...; Megatron adds this number of them itself"
    draft.add_note("changes meaning", text, "vocab_extra_ids")
