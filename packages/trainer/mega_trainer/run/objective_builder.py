"""Builder of a run's training objective from its configuration, with the reference model or teacher where it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from mega_ckpt.lora_adapter import fingerprint_base_model
from mega_ckpt.source import load_weights, open_weight_source, read_model_config
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.object_store import parse_location
from mega_common.progress_logging import logger
from mega_data.blended_dataset import BlendedDataset
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.data_check import extend_vocabulary, find_run_tokenizer
from mega_trainer.data.prompt_dataset import PromptDataset
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler, should_compile
from mega_trainer.model.auxiliary_models import DistillationTeacher
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_input_decoder import LayerInputTeacher
from mega_trainer.objectives.distillation_objective import (
    CachedTeacher,
    DistillationObjective,
    LiveTeacher,
    collect_teacher_top_k,
)
from mega_trainer.objectives.policy_objective import LiveRewardModel, PolicyObjective, RolloutGenerator
from mega_trainer.objectives.preference_objective import PreferenceObjective
from mega_trainer.objectives.sample_cache import (
    CachedReferenceModel,
    LiveReferenceModel,
    PrecomputedOutputCache,
    collect_reference_log_prob_sums,
    precompute_sample_outputs,
)
from mega_trainer.objectives.task_objectives import ClassificationObjective, ContrastiveObjective
from mega_trainer.objectives.token_loss_objective import TokenLossObjective
from mega_trainer.objectives.training_objective import TrainingObjective
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.run.build_components import build_pipeline_stages, build_schedule, choose_kernels, make_layer_builder
from mega_trainer.run.train_state import collect_stage_weights

REFERENCE_FILE = 512  # samples per cache file of a reference model
TEACHER_FILE = 1 << 23  # elements per cache file of a teacher


def build_objectives(
    config: RunConfig,
    executor: PipelineExecutor,
    device: torch.device,
    consumed: int,
    training: BlendedDataset,
    valid: BlendedDataset | None,
    generate: RolloutGenerator | None = None,
) -> tuple[TrainingObjective, TrainingObjective]:
    """Build the training and validation objective of a run, after computing reference or teacher outputs not yet cached.
    They include the reference or teacher model that they need. A collective call of all ranks.

    A reference model with cached log-probabilities is loaded only if some are missing, and freed before this returns.

    Args:
        consumed: samples of the training set that the run has already consumed.
        generate: samples answers of the model in training, for reinforcement learning.

    Raises:
        ConfigError: when reinforcement learning has no `generate`, or its reward function cannot be loaded.
        CheckpointError: when the reference model cannot be used.
    """
    kind, default = config.objective.kind, TrainingObjective(executor.parallel_groups, config.model.mtp_layers)
    if kind == "cross_entropy":
        return default, default
    if kind in ("classify", "contrastive"):
        task = (ClassificationObjective if kind == "classify" else ContrastiveObjective)(config, executor, device)
        return task, task
    added = config.registry.entries("objectives").get(kind)
    if added is not None:
        token_loss = partial(added.token_loss, options=added.options.parse(config.objective.options))
        return TokenLossObjective(executor.parallel_groups, config.model.mtp_layers, token_loss), default
    if kind == "distill":
        teacher = _build_teacher(config, executor.parallel_groups, device, training, consumed)
        return DistillationObjective(config, executor, teacher), default
    if kind == "grpo":
        return _build_policy_objective(config, executor, device, training, generate), default
    if not config.objective.uses_reference_model:
        objective = PreferenceObjective(config, executor, device, None)
        return objective, objective
    load = cache(partial(load_reference_model, config, executor.parallel_groups, device))
    if config.objective.reference == "live":
        live = LiveReferenceModel(load())
        return PreferenceObjective(config, executor, device, live), PreferenceObjective(config, executor, device, live)
    steps, batch = config.train.eval_steps, config.batch.global_
    train_samples = range(consumed, config.samples_per_split["train"])
    train_cache, valid_cache = (
        CachedReferenceModel(_cache_reference(config, load, device, data, samples))
        for data, samples in [
            (training, train_samples),
            (valid or training, range(valid is not None and steps * batch)),
        ]
    )
    return (
        PreferenceObjective(config, executor, device, train_cache),
        PreferenceObjective(config, executor, device, valid_cache),
    )


def _build_policy_objective(
    config: RunConfig,
    executor: PipelineExecutor,
    device: torch.device,
    prompts: BlendedDataset,
    generate: RolloutGenerator | None,
) -> PolicyObjective:
    """Return the objective of reinforcement learning, with its reference model if it has a KL term."""
    assert isinstance(prompts, PromptDataset)
    if generate is None:
        raise ConfigError("objective.kind = grpo requires the inference engine (mega_eval)", hint="use mega train")
    groups = executor.parallel_groups
    reference = load_reference_model(config, groups, device) if config.objective.uses_reference_model else None
    path, reward_model = config.objective.reward_model, None
    if path is not None:
        model = read_model_config(parse_location(path), families=config.registry.families)
        if model.vocab_size != config.model.vocab_size or not model.score:
            raise ConfigError(
                f"objective.reward_model = {path} must be a reward model with the vocabulary of the model, "
                f"{config.model.vocab_size} tokens",
                hint="use a model trained with objective.kind = reward and the tokenizer of the model",
            )
        scored = _replace_model(config, model, {"kind": "reward"}, f"objective.reward_model = {path}", kind="pairs")
        reward_model = LiveRewardModel(scored, _load_frozen_model(scored, groups, device, path), device)
    return PolicyObjective(config, executor, device, prompts, generate, reference, reward_model)


def _cache_reference(
    config: RunConfig, load: Callable[[], PipelineExecutor], device: torch.device, data: BlendedDataset, samples: range
) -> PrecomputedOutputCache:
    """Return the reference model's cached answer sums of these samples, after computing the missing ones."""
    key = (config.precision, config.objective.kind == "kto")
    files = _open_cache(config, Path(config.output) / "reference", _reference_path(config), data, *key)
    if files.first_missing_sample(samples.start) < samples.stop:
        reference = load()
        compute = partial(collect_reference_log_prob_sums, reference, config, device)
        precompute_sample_outputs(files, compute, config, reference.parallel_groups, data, samples, REFERENCE_FILE)
    return files


def _build_teacher(
    config: RunConfig, groups: ParallelGroups, device: torch.device, data: BlendedDataset, consumed: int
) -> LiveTeacher | CachedTeacher:
    """Return the live teacher, or its cached top-k of the run's samples, after computing the missing ones."""
    objective, samples = config.objective, range(consumed, config.samples_per_split["train"])
    assert objective.teacher is not None
    model = read_model_config(parse_location(objective.teacher), families=config.registry.families)
    if model.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"objective.teacher = {objective.teacher} must have the model's vocabulary size: it has {model.vocab_size} "
            f"tokens, the model {config.model.vocab_size}",
            hint="use a teacher with the model's tokenizer",
        )
    if objective.teacher_logits == "live":
        return LiveTeacher(load_teacher_model(config, groups, device, model))
    folder = Path(objective.cache or Path(config.output) / "teacher")
    files = _open_cache(config, folder, objective.teacher, data, config.precision, objective.top_k)
    if files.first_missing_sample(samples.start) < samples.stop:
        live = LiveTeacher(load_teacher_model(config, groups, device, model))
        samples_per_file = max(1, TEACHER_FILE // (config.data.seq_length * objective.top_k))
        compute = partial(collect_teacher_top_k, live, config, device)
        precompute_sample_outputs(files, compute, config, groups, data, samples, samples_per_file)
    return CachedTeacher(files)


def _open_cache(
    config: RunConfig, folder: Path, path: str, data: BlendedDataset, *more: object
) -> PrecomputedOutputCache:
    """Return the cache of a model's outputs for a data set, in a folder named by a hash of all their inputs."""
    source = open_weight_source(path, families=config.registry.families)
    key = repr((fingerprint_base_model(path, source)["digest"], data.fingerprint, *more))
    return PrecomputedOutputCache(folder / xxhash.xxh3_64_hexdigest(key.encode()))


def load_reference_model(config: RunConfig, groups: ParallelGroups, device: torch.device) -> PipelineExecutor:
    """Load the frozen reference model of a preference objective, in the run's parallel layout."""
    return _load_frozen_model(config, groups, device, _reference_path(config))


def load_teacher_model(
    config: RunConfig, groups: ParallelGroups, device: torch.device, model: ModelConfig
) -> PipelineExecutor:
    """Load the frozen teacher of a distillation run, of configuration `model`, in the run's parallel layout.

    Raises:
        ConfigError: when the teacher does not fit the run's layout.
    """
    path = config.objective.teacher
    assert path is not None
    teacher_config = _replace_model(config, model, {}, f"objective.teacher = {path}")
    teacher = LayerInputTeacher if model.per_layer_input_size or model.shared_kv_layers else DistillationTeacher
    executor = _load_frozen_model(teacher_config, groups, device, path, teacher)
    for stage in executor.stages.values():
        assert isinstance(stage, DistillationTeacher)
        stage.count = config.objective.top_k
    return executor


def _replace_model(
    config: RunConfig, model: ModelConfig, objective: Mapping[str, Any], source: str, **data: str
) -> RunConfig:
    """Return the configuration of a run with another model, in the run's layout.

    Raises:
        ConfigError: when the model does not fit the layout.
    """
    raw = config.model_dump(mode="json", by_alias=True)
    changes = {"model": model.model_dump(mode="json") | {"mtp_layers": 0}, "objective": objective, "lora": None}
    layout = {"parallel": {**raw["parallel"], "pipeline_layout": None}, "data": {**raw["data"], **data}}
    return RunConfig.parse({**raw, **changes, **layout}, source=source)


def _load_frozen_model(
    config: RunConfig, groups: ParallelGroups, device: torch.device, path: str, kind: type[Decoder] | None = None
) -> PipelineExecutor:
    """Load a model for inference in the run's layout."""
    trained = config.train.model_copy(update={"freeze": []})
    plain = config.model_copy(update={"lora": None, "cuda_graphs": "off", "train": trained})
    leaves, schedule = (
        FusibleFunctionCompiler(compiled=should_compile(config.compile, device)),
        build_schedule(plain, groups),
    )
    builder = make_layer_builder(plain, groups, device, choose_kernels(plain, device), leaves)
    stages = build_pipeline_stages(plain, builder, schedule, kind)
    for stage in stages.values():
        stage.requires_grad_(False).eval()
    source = open_weight_source(path, families=config.registry.families)
    if path == config.init_from:  # the run may have extended its vocabulary
        source = extend_vocabulary(plain, source, find_run_tokenizer(config.data, config.model.vocab_size))
    load_weights(source, collect_stage_weights(stages))
    logger.info("model %s loaded for inference", path)
    return PipelineExecutor(schedule, stages, groups.pp)


def _reference_path(config: RunConfig) -> str:
    path = config.objective.reference_model or config.init_from
    assert path is not None
    return path
