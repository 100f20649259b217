"""What a run makes small, made from its configuration, with the reference model where it has one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
import xxhash

from mega_ckpt.adapter import base_of
from mega_ckpt.source import load_weights, model_at, open_source
from mega_common.errors import ConfigError
from mega_common.log import logger
from mega_common.model_config import ModelConfig
from mega_common.remote import place
from mega_data.dataset import BlendedDataset
from mega_trainer.build import build_schedule, build_stages, choose_kernels, make_builder
from mega_trainer.config import RunConfig
from mega_trainer.kernels.leaves import Leaves, compiles
from mega_trainer.mesh import Groups
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.teacher import Teacher
from mega_trainer.objectives.ask import ask
from mega_trainer.objectives.base import Objective
from mega_trainer.objectives.distillation import CachedTeacher, Distillation, LiveTeacher, tokens_of_samples
from mega_trainer.objectives.preference import Preference
from mega_trainer.objectives.reference import CachedReference, LiveReference, sums_of_samples
from mega_trainer.objectives.sample_files import SampleFiles
from mega_trainer.pipeline.run import Executor
from mega_trainer.state import weights_of
from mega_trainer.tokens import run_tokenizer, with_vocabulary

REFERENCE_FILE = 512  # samples of a file of a reference's
TEACHER_FILE = 1 << 23  # elements of a file of a teacher's


def make_objectives(
    config: RunConfig,
    executor: Executor,
    device: torch.device,
    consumed: int,
    training: BlendedDataset,
    valid: BlendedDataset | None,
) -> tuple[Objective, Objective]:
    """What the run makes small, and what its validations measure. A collective call of all ranks.

    A reference model whose log-probabilities are cached is in memory in this call alone, and only where some are missing.

    Args:
        consumed: samples of the training set that are behind.

    Raises:
        CheckpointError: when the reference model cannot be used.
    """
    kind, usual = config.objective.kind, Objective(executor.groups, config.model.mtp_layers)
    if kind == "cross_entropy":
        return usual, usual
    if kind == "distill":
        return Distillation(config, executor, _teacher(config, executor.groups, device, training, consumed)), usual
    if not config.objective.refers:
        alone = Preference(config, executor, device, None)
        return alone, alone
    steps, batch = config.train.eval_steps, config.batch.global_
    samples = range(consumed, config.samples["train"])
    wanted = [(training, samples), (valid or training, range(valid is not None and steps * batch))]
    model = cache(partial(reference_model, config, executor.groups, device))
    if config.objective.reference == "live":
        ours, others = (Preference(config, executor, device, LiveReference(model())) for _ in wanted)
        return ours, others
    ours, others = (
        Preference(config, executor, device, CachedReference(_reference(config, model, device, data, own)))
        for data, own in wanted
    )
    return ours, others


def _reference(
    config: RunConfig, model: Callable[[], Executor], device: torch.device, data: BlendedDataset, samples: range
) -> SampleFiles:
    """The files with what the reference model makes of these samples, of which missing ones are told now."""
    key = (config.precision, config.objective.kind == "kto")
    files = _files(Path(config.output) / "reference", _path(config), data, *key)
    if files.end(samples.start) < samples.stop:
        asked = model()
        ask(files, partial(sums_of_samples, asked, config, device), config, asked.groups, data, samples, REFERENCE_FILE)
    return files


def _teacher(
    config: RunConfig, groups: Groups, device: torch.device, data: BlendedDataset, consumed: int
) -> LiveTeacher | CachedTeacher:
    """The teacher, or the files with what it makes of the run's samples, of which missing ones are told now."""
    objective, samples = config.objective, range(consumed, config.samples["train"])
    assert objective.teacher is not None
    told = model_at(place(objective.teacher))
    if told.vocab_size != config.model.vocab_size:
        raise ConfigError(
            f"objective.teacher = {objective.teacher}: has {told.vocab_size} tokens in its vocabulary, and the model "
            f"{config.model.vocab_size}",
            hint="a student learns from a teacher with the same tokenizer",
        )
    if objective.teacher_logits == "live":
        return LiveTeacher(teacher_model(config, groups, device, told))
    folder = Path(objective.cache or Path(config.output) / "teacher")
    files = _files(folder, objective.teacher, data, config.precision, objective.top_k)
    if files.end(samples.start) < samples.stop:
        live = LiveTeacher(teacher_model(config, groups, device, told))
        together = max(1, TEACHER_FILE // (config.data.seq_length * objective.top_k))
        ask(files, partial(tokens_of_samples, live, config, device), config, groups, data, samples, together)
    return CachedTeacher(files)


def _files(folder: Path, path: str, data: BlendedDataset, *more: object) -> SampleFiles:
    """Those of what a model tells of a data set: in a folder that is named by all that this depends on."""
    key = repr((base_of(path, open_source(path))["digest"], data.fingerprint, *more))
    return SampleFiles(folder / xxhash.xxh3_64_hexdigest(key.encode()))


def reference_model(config: RunConfig, groups: Groups, device: torch.device) -> Executor:
    """The reference model in the run's layout, which nothing trains."""
    return _asked(config, groups, device, _path(config))


def teacher_model(config: RunConfig, groups: Groups, device: torch.device, model: ModelConfig) -> Executor:
    """The teacher in the run's layout, which nothing trains.

    Raises:
        ConfigError: when it does not fit that.
    """
    path, raw = config.objective.teacher, config.model_dump(mode="json", by_alias=True)
    assert path is not None
    its = {"model": model.model_dump(mode="json") | {"mtp_layers": 0}, "objective": {}, "lora": None}
    layout = {"parallel": {**raw["parallel"], "pipeline_layout": None}}
    made = RunConfig.parse({**raw, **its, **layout}, source=f"objective.teacher = {path}")
    executor = _asked(made, groups, device, path, Teacher)
    for stage in executor.stages.values():
        assert isinstance(stage, Teacher)
        stage.count = config.objective.top_k
    return executor


def _asked(
    config: RunConfig, groups: Groups, device: torch.device, path: str, kind: type[Decoder] | None = None
) -> Executor:
    """A model that is asked, and not trained."""
    plain = config.model_copy(update={"lora": None, "train": config.train.model_copy(update={"freeze": []})})
    leaves, schedule = Leaves(compiled=compiles(config.compile, device)), build_schedule(plain, groups)
    builder = make_builder(plain, groups, device, choose_kernels(plain, device), leaves)
    stages = build_stages(plain, builder, schedule, kind)
    for stage in stages.values():
        stage.requires_grad_(False).eval()
    source = open_source(path)
    if path == config.init_from:  # what the run started from
        source = with_vocabulary(plain, source, run_tokenizer(config.data, config.model.vocab_size))
    load_weights(source, weights_of(stages))
    logger.info("asking the model of %s", path)
    return Executor(schedule, stages, groups.pp)


def _path(config: RunConfig) -> str:
    path = config.objective.reference_model or config.init_from
    assert path is not None
    return path
