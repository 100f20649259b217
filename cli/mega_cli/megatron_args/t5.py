"""Megatron's own T5: what `pretrain_t5.py` makes of its flags."""

from __future__ import annotations

from mega_cli.megatron_args.draft import Draft
from mega_cli.megatron_args.launch import T5


def is_t5(draft: Draft) -> bool:
    """Whether the script trains T5, which its program alone tells."""
    return draft.program == T5


def t5_layers(draft: Draft) -> int | None:
    """Layers of both stacks: those of `--num-layers` each, unless one has a number of its own."""
    encoder = draft["encoder_num_layers"] or draft["num_layers"]
    decoder = draft["decoder_num_layers"] or draft["num_layers"] or encoder
    return encoder + decoder if encoder and decoder else None


def t5_section(draft: Draft) -> None:
    """Write the keys of `model:` and `data:` that a decoder has not."""
    put, tied = draft.put, not draft["untie_embeddings_and_output_weights"]
    flags = ("encoder_num_layers", "decoder_num_layers")
    put("model.encoder.num_layers", draft["encoder_num_layers"] or draft["num_layers"], "num_layers", *flags)
    put("model.encoder.head_bias", tied, because="Megatron's T5 has one where the embedding is the output matrix")
    if draft["position_embedding_type"] == "relative":
        put("model.relative.buckets", draft["relative_attention_num_buckets"], "relative_attention_num_buckets")
        put("model.relative.max_distance", draft["relative_attention_max_distance"], "relative_attention_max_distance")
    put("data.kind", "t5", because="what pretrain_t5.py reads")
    put("data.t5.decoder_seq_length", draft["decoder_seq_length"], "decoder_seq_length")
    put("data.t5.mask_probability", draft["mask_prob"], "mask_prob")
    put("data.t5.short_probability", draft["short_seq_prob"], "short_seq_prob")
    text = "the tokenizer's folder has to have the sentinels, <extra_id_0> and on; Megatron adds so many to its vocabulary file's"
    draft.tell("changes meaning", text, "vocab_extra_ids")
