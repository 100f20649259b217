"""Requirements of encoder-decoder models and of retrieval models on other settings of a run. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mega_common.strict_config import ConfigProblem

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig


def find_encoder_decoder_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield settings that conflict with an encoder-decoder model, or with data of two sequences per sample."""
    model, data = config.model, config.data
    if (model.encoder is not None) != (data.dataset_kinds == {"t5"}):
        if model.encoder is None:
            rule, hint = "is data for an encoder and a decoder, and the model is a decoder alone", "text or fim"
        else:
            rule, hint = "has one sequence a sample, and the model has an encoder", "t5"
        yield ConfigProblem("data.kind", rule, sorted(data.dataset_kinds)[0], hint)
        return
    if model.encoder is None:
        return
    yield from _length_problems(config)
    if config.parallel.cp > 1 and model.position == "relative" and config.parallel.cp_kind != "alltoall":
        rule = "computes block by block, and adds nothing to scores there: model.position = relative"
        yield ConfigProblem("parallel.cp_kind", rule, config.parallel.cp_kind, "alltoall")
    if config.parallel.cp > 1 and model.attention_dropout:
        rule = "splits the decoder's tokens, and the dropout of a head of cross attention is drawn as a whole"
        yield ConfigProblem("parallel.cp", rule, config.parallel.cp, "1, or model.attention_dropout: 0")
    if config.precision == "fp8":
        yield ConfigProblem("precision", "is not for encoder-decoders", "fp8", "bf16")


def find_retrieval_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield settings that conflict with a model that reads retrieved neighbours."""
    retro, parallel, length = config.model.retro, config.parallel, config.data.seq_length
    if (retro is not None) != ("retro" in config.data.dataset_kinds):
        if retro is None:
            yield ConfigProblem(
                "data.kind", "brings neighbours, which the model does not read", "retro", "text, or model.retro"
            )
        else:
            told = sorted(config.data.dataset_kinds)[0]
            yield ConfigProblem(
                "data.kind", "has no neighbours, which model.retro reads", told, "retro (mega data retrieve)"
            )
    if retro is None:
        return
    if length % retro.chunk_length:
        rule = f"must be a multiple of model.retro.chunk_length = {retro.chunk_length}"
        yield ConfigProblem("data.seq_length", rule, length, str(-(-length // retro.chunk_length) * retro.chunk_length))
    if parallel.sp and retro.neighbor_length % parallel.tp:
        rule = f"must divide the {retro.neighbor_length} tokens of a neighbour, which sp splits"
        yield ConfigProblem("parallel.tp", rule, parallel.tp, "a power of two, or sp: false")
    if parallel.cp > 1:
        rule = "splits the text at places that no chunk of model.retro ends at"
        yield ConfigProblem("parallel.cp", rule, parallel.cp, "1, with tp and sp, or recompute")
    if config.precision == "fp8":
        yield ConfigProblem("precision", "is not for model.retro", "fp8", "bf16")
    if config.eval.tasks:
        yield ConfigProblem(
            "eval.tasks", "have no neighbours, which model.retro reads", config.eval.tasks, "leave them out"
        )
    if config.lora is not None:
        yield ConfigProblem("lora", "is not for model.retro", hint="leave it out: all weights, or train.freeze")


def _length_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    parallel, length = config.parallel, config.target_length
    key = "data.t5.decoder_seq_length"
    unit = (2 * parallel.cp if parallel.cp > 1 else 1) * (parallel.tp if parallel.sp else 1)
    if length % unit:
        rule = f"must be a multiple of {unit}, as data.seq_length, for cp = {parallel.cp} and sp = {parallel.sp}"
        yield ConfigProblem(key, rule, length, str(-(-length // unit) * unit))
    if config.model.position == "learned" and length > config.model.max_position:
        yield ConfigProblem(key, f"longer than model.max_position = {config.model.max_position}", length)
