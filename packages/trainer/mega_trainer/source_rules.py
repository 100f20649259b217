"""What a run with an encoder-decoder, or with retrieval, asks of its other settings. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mega_common.config import Problem

if TYPE_CHECKING:
    from mega_trainer.config import RunConfig


def source_problems(config: RunConfig) -> Iterator[Problem]:
    """What does not fit a model with an encoder, or data with two sequences a sample."""
    model, data = config.model, config.data
    if (model.encoder is not None) != (data.kinds == {"t5"}):
        if model.encoder is None:
            rule, hint = "is data for an encoder and a decoder, and the model is a decoder alone", "text or fim"
        else:
            rule, hint = "has one sequence a sample, and the model has an encoder", "t5"
        yield Problem("data.kind", rule, sorted(data.kinds)[0], hint)
        return
    if model.encoder is None:
        return
    yield from _length_problems(config)
    if config.parallel.cp > 1 and model.position == "relative" and config.parallel.cp_kind != "alltoall":
        rule = "computes block by block, and adds nothing to scores there: model.position = relative"
        yield Problem("parallel.cp_kind", rule, config.parallel.cp_kind, "alltoall")
    if config.parallel.cp > 1 and model.attention_dropout:
        rule = "splits the decoder's tokens, and the dropout of a head of cross attention is drawn as a whole"
        yield Problem("parallel.cp", rule, config.parallel.cp, "1, or model.attention_dropout: 0")
    if config.precision == "fp8":
        yield Problem("precision", "is not for encoder-decoders", "fp8", "bf16")


def retrieval_problems(config: RunConfig) -> Iterator[Problem]:
    """What does not fit a model that reads neighbours."""
    retro, parallel, length = config.model.retro, config.parallel, config.data.seq_length
    if retro is None:
        return
    if length % retro.chunk_length:
        rule = f"must be a multiple of model.retro.chunk_length = {retro.chunk_length}"
        yield Problem("data.seq_length", rule, length, str(-(-length // retro.chunk_length) * retro.chunk_length))
    if parallel.sp and retro.neighbor_length % parallel.tp:
        rule = f"must divide the {retro.neighbor_length} tokens of a neighbour, which sp splits"
        yield Problem("parallel.tp", rule, parallel.tp, "a power of two, or sp: false")
    if parallel.cp > 1:
        rule = "splits the text at places that no chunk of model.retro ends at"
        yield Problem("parallel.cp", rule, parallel.cp, "1, with tp and sp, or recompute")
    if config.precision == "fp8":
        yield Problem("precision", "is not for model.retro", "fp8", "bf16")
    if config.lora is not None:
        yield Problem("lora", "is not for model.retro", hint="leave it out: all weights, or train.freeze")


def _length_problems(config: RunConfig) -> Iterator[Problem]:
    parallel, length = config.parallel, config.target_length
    key = "data.t5.decoder_seq_length"
    unit = (2 * parallel.cp if parallel.cp > 1 else 1) * (parallel.tp if parallel.sp else 1)
    if length % unit:
        rule = f"must be a multiple of {unit}, as data.seq_length, for cp = {parallel.cp} and sp = {parallel.sp}"
        yield Problem(key, rule, length, str(-(-length // unit) * unit))
    if config.model.position == "learned" and length > config.model.max_position:
        yield Problem(key, f"longer than model.max_position = {config.model.max_position}", length)
