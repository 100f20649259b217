"""Requirements of model architectures on other settings of a run: bidirectional encoders, encoder-decoders, retrieval.
No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mega_common.lora_config import LoraConfig
from mega_common.model_config import ModelConfig
from mega_common.retro_config import RetroConfig
from mega_common.strict_config import ConfigProblem
from mega_data.data_config import DataConfig
from mega_trainer.config.sections import ParallelConfig

MASKED_KINDS = ("bert", "masked")
WITH_PAIRS = "model.pooler=true and model.sentence_pairs=true"


def find_architecture_problems(
    model: ModelConfig,
    data: DataConfig,
    parallel: ParallelConfig,
    *,
    precision: str,
    tasks: Sequence[str],
    lora: LoraConfig | None,
) -> Iterator[ConfigProblem]:
    """Yield settings of data, parallelism, precision, tasks and LoRA that conflict with the model's architecture.

    `tasks` are the lm-evaluation-harness tasks that run during training.
    """
    yield from _position_problems(model, data)
    if parallel.cp > 1 and model.position == "alibi" and parallel.cp_kind != "alltoall":
        rule = "is not supported with linear position biases (model.position = alibi)"
        yield ConfigProblem("parallel.cp_kind", rule, parallel.cp_kind, "set parallel.cp_kind=alltoall")
    if parallel.cp > 1 and model.attention_scores is not None:
        rule = f"is not supported with model.attention_scores = {model.attention_scores}, which requires all keys on a rank"
        yield ConfigProblem("parallel.cp", rule, parallel.cp, "set parallel.cp=1")
    if model.per_layer_input_size and tasks and (parallel.pp > 1 or parallel.zero == 3):
        rule = "requires parallel.pp = 1 and parallel.zero <= 2 for a model with model.per_layer_input_size"
        hint = "remove eval.tasks, and run mega eval --tasks on the checkpoints"
        yield ConfigProblem("eval.tasks", rule, list(tasks), hint)
    if model.relative_bias:
        yield from _shared_bias_problems(parallel)
    yield from _bidirectional_problems(model, data, tasks)
    yield from _encoder_decoder_problems(model, data, parallel, precision, tasks)
    if (model.retro is not None) != ("retro" in data.dataset_kinds):
        yield _retrieval_data_problem(model, data)
    if model.retro is not None:
        yield from _retrieval_problems(model.retro, data.seq_length, parallel, precision)
        yield from _retrieval_use_problems(tasks, lora)


def _shared_bias_problems(parallel: ParallelConfig) -> Iterator[ConfigProblem]:
    """Yield layouts in which a layer lacks the bias table that all layers share, or context ranks the whole sequence."""
    rule = "is not supported with a bias table that all layers share (model.relative_bias)"
    if parallel.pp > 1:
        yield ConfigProblem("parallel.pp", rule, parallel.pp, "set parallel.pp=1")
    if parallel.zero == 3:
        yield ConfigProblem("parallel.zero", rule, parallel.zero, "set parallel.zero=2")
    if parallel.cp > 1 and parallel.cp_kind != "alltoall":
        yield ConfigProblem("parallel.cp_kind", rule, parallel.cp_kind, "set parallel.cp_kind=alltoall")


def _position_problems(model: ModelConfig, data: DataConfig) -> Iterator[ConfigProblem]:
    length, limit = data.seq_length, model.max_position
    if model.position == "learned" and length > limit:
        yield _past_positions("data.seq_length", length, limit)


def _past_positions(key: str, length: int, limit: int) -> ConfigProblem:
    rule = f"must be at most model.max_position = {limit}, as positions are learned"
    return ConfigProblem(key, rule, length, f"set {key}={limit}, or set model.max_position={length}")


def _bidirectional_problems(model: ModelConfig, data: DataConfig, tasks: Sequence[str]) -> Iterator[ConfigProblem]:
    """Yield conflicts between bidirectional models and data without masked tokens, and the reverse."""
    kinds, types = data.dataset_kinds, max(2, model.token_types)
    masked = [kind for kind in MASKED_KINDS if kind in kinds]
    has_head = model.sentence_pairs and model.token_types > 1
    needs_head = "bert" in kinds and data.bert.sentence_pairs and not has_head
    head = f"model.token_types={types} and {WITH_PAIRS}"
    if model.causal and masked:
        rule = "requires a bidirectional model (model.causal = false)"
        hint = "set model.causal=false" + f" and {head}" * needs_head + ", or set data.kind=text"
        yield ConfigProblem("data.kind", rule, masked[0], hint)
    if not model.causal and not masked and model.task_head is None:
        rule = "requires data with masked tokens (data.kind = masked or bert)"
        yield ConfigProblem("model.causal", rule, False, "set data.kind=masked")
    if model.embedding_size and masked and not model.masked_lm:
        rule = "requires a head for masked tokens (model.masked_lm)"
        yield ConfigProblem("model.embedding_size", rule, model.embedding_size, "set model.masked_lm={}")
    if model.task_head is not None and tasks:
        yield ConfigProblem("eval.tasks", "is not supported with model.task_head", list(tasks), "remove eval.tasks")
    elif not model.causal and tasks:
        rule = "is not supported for a bidirectional model, which cannot continue text"
        yield ConfigProblem("eval.tasks", rule, list(tasks), "remove eval.tasks")
    if needs_head:
        rule = "requires token types and a sentence-pair head in the model"
        hint = f"set data.bert.sentence_pairs=false, or set model.causal=false and {head}"
        yield ConfigProblem("data.bert.sentence_pairs", rule, True, hint)


def _encoder_decoder_problems(
    model: ModelConfig, data: DataConfig, parallel: ParallelConfig, precision: str, tasks: Sequence[str]
) -> Iterator[ConfigProblem]:
    """Yield settings that conflict with an encoder-decoder model, or with data of two sequences per sample."""
    if (model.encoder is not None) != (data.dataset_kinds == {"t5"}):
        rule, kind = (
            ("requires an encoder-decoder model (model.encoder)", "text")
            if model.encoder is None
            else ("must be t5 for an encoder-decoder model (model.encoder)", "t5")
        )
        yield ConfigProblem("data.kind", rule, sorted(data.dataset_kinds)[0], f"set data.kind={kind}")
        return
    if model.encoder is None:
        return
    yield from _decoder_length_problems(model, data, parallel)
    if parallel.cp > 1 and model.position == "relative" and parallel.cp_kind != "alltoall":
        rule = "is not supported with relative position biases (model.position = relative)"
        yield ConfigProblem("parallel.cp_kind", rule, parallel.cp_kind, "set parallel.cp_kind=alltoall")
    if parallel.cp > 1 and model.attention_dropout:
        rule = "is not supported for an encoder-decoder model with attention dropout"
        yield ConfigProblem("parallel.cp", rule, parallel.cp, "set parallel.cp=1, or set model.attention_dropout=0")
    if precision == "fp8":
        yield ConfigProblem("precision", "is not supported for encoder-decoder models", "fp8", "set precision=bf16")
    if tasks and (parallel.pp > 1 or parallel.zero == 3):
        rule = "requires parallel.pp = 1 and parallel.zero <= 2 for an encoder-decoder model"
        hint = "remove eval.tasks, and run mega eval --tasks on the checkpoints"
        yield ConfigProblem("eval.tasks", rule, list(tasks), hint)


def _decoder_length_problems(model: ModelConfig, data: DataConfig, parallel: ParallelConfig) -> Iterator[ConfigProblem]:
    length, key = data.t5.get_decoder_length(data.seq_length), "data.t5.decoder_seq_length"
    unit = (2 * parallel.cp if parallel.cp > 1 else 1) * (parallel.tp if parallel.sp else 1)
    if length % unit:
        rule = f"must be a multiple of {unit}, with parallel.cp = {parallel.cp} and parallel.sp = {parallel.sp}"
        yield ConfigProblem(key, rule, length, f"set {key}={-(-length // unit) * unit}")
    if model.position == "learned" and length > model.max_position:
        yield _past_positions(key, length, model.max_position)


def _retrieval_data_problem(model: ModelConfig, data: DataConfig) -> ConfigProblem:
    """Return the conflict between a retrieval model and data without neighbors, or the reverse."""
    if model.retro is None:
        rule, hint = "requires a retrieval model (model.retro)", "set data.kind=text"
        return ConfigProblem("data.kind", rule, "retro", hint)
    rule = "must be retro for a retrieval model (model.retro)"
    hint = "set data.kind=retro, with neighbors from mega data retrieve"
    return ConfigProblem("data.kind", rule, sorted(data.dataset_kinds)[0], hint)


def _retrieval_problems(
    retro: RetroConfig, length: int, parallel: ParallelConfig, precision: str
) -> Iterator[ConfigProblem]:
    """Yield layouts and precisions that conflict with a model that reads retrieved neighbors."""
    if length % retro.chunk_length:
        rule = f"must be a multiple of model.retro.chunk_length = {retro.chunk_length}"
        hint = f"set data.seq_length={-(-length // retro.chunk_length) * retro.chunk_length}"
        yield ConfigProblem("data.seq_length", rule, length, hint)
    if parallel.sp and retro.neighbor_length % parallel.tp:
        rule = f"must divide model.retro.neighbor_length = {retro.neighbor_length}, with parallel.sp = true"
        yield ConfigProblem("parallel.tp", rule, parallel.tp, "set parallel.sp=false")
    if parallel.cp > 1:
        yield ConfigProblem("parallel.cp", "is not supported with model.retro", parallel.cp, "set parallel.cp=1")
    if precision == "fp8":
        yield ConfigProblem("precision", "is not supported with model.retro", "fp8", "set precision=bf16")


def _retrieval_use_problems(tasks: Sequence[str], lora: LoraConfig | None) -> Iterator[ConfigProblem]:
    if tasks:
        rule = "is not supported with model.retro: the texts of tasks have no neighbors"
        yield ConfigProblem("eval.tasks", rule, list(tasks), "remove eval.tasks")
    if lora is not None:
        hint = "remove lora, and train all weights or those that train.freeze leaves"
        yield ConfigProblem("lora", "is not supported with model.retro", None, hint)
