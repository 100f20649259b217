"""Start of a run: the checkpoint or memory copy it resumes from, with the saved data order, and a check of its settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.store import (
    Checkpoint,
    Location,
    latest_checkpoint,
    parse_location,
    save_sharded_checkpoint,
)
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig
from mega_common.progress_logging import logger
from mega_common.strict_config import format_setting_value
from mega_data.data_config import StreamPosition
from mega_data.sampling.staged_blend import resume_data_config
from mega_trainer.config.run_config import RunConfig, flatten_settings
from mega_trainer.job.memory_checkpoint import MemoryCheckpoint, TrainingStateCopy
from mega_trainer.job.training_guard import SkippedSampleRanges

# Settings whose change alters the model.
MODEL_SETTINGS = ("model", "lora")
# Settings that determine sample number k of a data set; in Megatron's order the blend and the length of the run do as
# well, while in the others each data set continues with its next sample (`mega_data.sampling.staged_blend`).
ORDER_SETTINGS = (
    "data.split", "data.seq_length", "data.order", "data.block_tokens", "data.kind", "data.long_documents", "train.seed",
)  # fmt: skip
LENGTH_SETTINGS = ("data.train", "train.steps", "batch.global", "batch.rampup", "batch.stages")
LR_SETTINGS = ("lr_schedule.", "optimizer.lr", "train.steps", "batch.")  # that determine the learning rate of a step
EQUAL_STATE = {"adamw", "adamw8bit"}  # optimizers whose checkpoints have equal tensors
JUMP = 0.1  # share of the highest rate: smaller changes are accepted


def check_resume_settings(state: Mapping[str, Any], step: int, config: RunConfig, where: str) -> list[str]:
    """Return log lines about settings changed since a checkpoint; `ConfigError` if the run may not resume from it.
    `config` is the run's configuration, `where` the checkpoint of `step`, and `state` its saved state; a log line has a
    changed setting and its effects.

    Raises:
        ConfigError: when a setting of the model, the precision or the optimizer differs, or the learning rate would jump.
    """
    saved, consumed = state["settings"], state["consumed_samples"]
    found = list_allowed_setting_changes(saved, config, where)
    versions, before = config.registry.versions, state.get("extensions", {})
    found += [
        f"version of the extension {name}: {before[name]} -> {version}"
        for name, version in versions.items()
        if before.get(name, version) != version
    ]
    precision, compatible = saved.get("precision", config.precision), {"bf16", "fp8"}  # with equal weights and state
    if precision != config.precision and not {precision, config.precision} <= compatible:
        raise ConfigError(
            f"precision = {config.precision} conflicts with that of the resumed checkpoint {where}, {precision}",
            hint=f"set precision={precision}; or set init_from={where} and another output to start from its weights only",
        )
    _check_optimizer(saved, config, where)
    if step >= config.train.steps:
        return found
    order = [*ORDER_SETTINGS, *(LENGTH_SETTINGS if config.data.sample_order == "megatron" else ())]
    if changed := [key for key in order if any(line.startswith((f"{key}:", f"{key}.")) for line in found)]:
        found.append(
            f"{' and '.join(changed)} changed the order of samples, which is read from sample {consumed} on; some samples are "
            "read again, and some are never read"
        )
    return [*found, *_lr_change_lines(saved, consumed, config, where, found)]


def find_resume_changes(config: RunConfig) -> list[str]:
    """Return log lines about the checkpoint that a run would resume from and the settings changed since; empty for a new run.

    The order of samples and the learning rate are not compared if `train.epochs` is set: its steps are known once the data is
    open.

    Raises:
        CheckpointError: when the configured checkpoint does not exist.
        ConfigError: as `check_resume_settings`.
    """
    if (checkpoint := find_start_checkpoint(config)) is None:
        return []
    saved = Checkpoint.open_folder(checkpoint)
    if "settings" not in saved.trainer_state:
        return []
    config, where = inherit_data_order(config, saved.trainer_state), str(checkpoint)
    if config.train.epochs is not None:
        changes = list_allowed_setting_changes(saved.trainer_state["settings"], config, where)
    else:
        changes = check_resume_settings(saved.trainer_state, saved.step, config, where)
    return [f"resumes from {where}", *(f"changed: {line}" for line in changes)]


def _check_optimizer(saved: Mapping[str, Any], config: RunConfig, where: str) -> None:
    """Raise `ConfigError` for another optimizer, which would drop state that the checkpoint has, or lack some."""
    before, now = saved.get("optimizer", {}).get("name", config.optimizer.name), config.optimizer.name
    if before != now and not {before, now} <= EQUAL_STATE:
        raise ConfigError(
            f"optimizer.name = {now} conflicts with that of the resumed checkpoint {where}, {before}",
            hint=f"set optimizer.name={before}; or set init_from={where} and another output to start from its weights only",
        )


def list_allowed_setting_changes(saved: Mapping[str, Any], config: RunConfig, where: str) -> list[str]:
    """Return the settings that differ from saved ones as `path: old -> new`; `ConfigError` for a model that may not differ."""
    of_model, others = diff_run_settings(saved, config)
    fits = not of_model or _has_saved_tensors(saved, config)
    if of_model and not (fits and config.checkpoint.allow_changes):
        ways = "set the saved values, start in another output folder, or set checkpoint.allow_changes=true"
        raise ConfigError(
            f"{where} was saved by another model:\n" + "\n".join(f"  {line}" for line in of_model),
            hint=ways if fits else "set the saved values, or start in another output folder",
        )
    return of_model + others


def _has_saved_tensors(saved: Mapping[str, Any], config: RunConfig) -> bool:
    """Return whether the model of a checkpoint's saved settings has tensors of the same names and shapes as the present one."""
    try:
        model = _parse_saved(saved, config).model
    except ValidationError:  # settings unknown to this version
        return True
    return dict(canonical_tensors(model)) == dict(canonical_tensors(config.model))


def diff_run_settings(saved: Mapping[str, Any], config: RunConfig) -> tuple[list[str], list[str]]:
    """Return the settings that differ from a saved run's, as `path: old -> new`: those of the model, and others.

    Sections that were not saved, as in a converted checkpoint, are not compared, and settings that did not exist yet
    had their defaults.
    """
    current = config.model_dump(mode="json", by_alias=True)
    with suppress(ValidationError):  # settings unknown to this version are compared as saved
        saved = _parse_saved(saved, config).model_dump(mode="json", by_alias=True, include={*saved})
    now, before = (
        flatten_settings({name: value for name, value in current.items() if name in saved}),
        flatten_settings(saved),
    )
    lines = {
        path: f"{path}: {_format_setting(before.get(path))} -> {_format_setting(now.get(path))}"
        for path in sorted(now.keys() | before.keys())
        if before.get(path) != now.get(path)
        and not path.startswith("data.begun")  # logged by `mega_data.sampling.staged_blend`
    }
    of_model = [line for path, line in lines.items() if path.split(".")[0] in MODEL_SETTINGS]
    return of_model, [line for line in lines.values() if line not in of_model]


def _format_setting(value: object) -> str:
    """Return a setting as written in run.yaml; in a list of sections, such as data.train, without unset keys."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        items = [{key: inner for key, inner in item.items() if inner not in (None, {}, [])} for item in value]
        short = [item["path"] if item.keys() == {"path"} else item for item in items]
        value = short[0] if len(short) == 1 else short
    return format_setting_value(value)


def _parse_saved(saved: Mapping[str, Any], config: RunConfig) -> RunConfig:
    own = config.model_dump(mode="json", by_alias=True)
    # a saved list of extensions is never loaded
    return RunConfig.model_validate({**own, **saved, "extensions": config.extensions})


def _lr_change_lines(
    saved: Mapping[str, Any], consumed: int, config: RunConfig, where: str, changes: Sequence[str]
) -> Iterator[str]:
    """Yield the old and the new learning rate of the next step, if they differ.

    A jump is a change that is not explained by a change of optimizer.lr.
    """
    if not saved.keys() >= {"lr_schedule", "optimizer", "train", "batch"}:
        return
    try:
        curves = _parse_saved(saved, config).build_lr_curve(), config.build_lr_curve()
    except ValidationError:
        return
    before, after = (curve(consumed) for curve in curves)
    if math.isclose(before, after, rel_tol=1e-9):
        return
    change = f"the learning rate of the next step: {before:.3g} -> {after:.3g}"
    moved = abs(before / curves[0].highest - after / curves[1].highest)
    if moved > JUMP and not config.checkpoint.allow_lr_jump:
        causes = [line for line in changes if line.startswith(LR_SETTINGS)]
        raise ConfigError(
            f"{'; '.join(causes) or 'changed settings'} (resuming from {where}) would make a jump of {change}",
            hint=f"set lr_schedule.decay_steps={max(1, config.batch.steps_for_samples(curves[0].end))} to keep the end of the decay, or "
            "set checkpoint.allow_lr_jump=true",
        )
    yield change


def find_start_checkpoint(config: RunConfig) -> Location | None:
    """Return the checkpoint to resume from: the newest of this run, or the configured one if none is newer, or None.

    A run that began from another run's checkpoint resumes from its own checkpoints once it has saved one. A run with
    `checkpoint.resume = false` has none of its own (`run_folder`).

    Raises:
        CheckpointError: when the configured one does not exist, or is one of this run and not the newest.
    """
    newest = latest_checkpoint(config.checkpoint_root)
    if config.checkpoint.load is not None:
        configured = parse_location(config.checkpoint.load)
        found = (
            latest_checkpoint(configured) or latest_checkpoint(configured / "checkpoints")
            if not (configured / "manifest.json").exists()
            else configured
        )
        if found is None:
            missing = isinstance(configured, Path) and not configured.exists()
            raise CheckpointError(
                f"checkpoint.load = {config.checkpoint.load!r} "
                + ("does not exist: no such folder" if missing else "holds no complete checkpoint"),
                hint="set a folder such as runs/name/checkpoints/step-00000100, or remove checkpoint.load",
            )
        if newest is None or Checkpoint.open_folder(newest).step <= Checkpoint.open_folder(found).step:
            return found
        if _absolute_path(found.parent) == _absolute_path(config.checkpoint_root):
            raise CheckpointError(
                f"checkpoint.load = {found.name} is older than the newest checkpoint of {config.checkpoint_root}, {newest.name}",
                hint="set another output folder for the new branch",
            )
    if newest is not None:
        logger.info("resuming from %s", newest)
    return newest


def _absolute_path(path: Location) -> Location:
    return path.resolve() if isinstance(path, Path) else path


def find_newer_memory_copy(
    config: RunConfig, checkpoint: Location | None, memory: MemoryCheckpoint | None
) -> TrainingStateCopy | Location | None:
    """Return this rank's memory copy, or a checkpoint written from all copies, to start from; None if none is newer.

    It is this rank's copy if the number of ranks and the settings are equal.
    """
    found = None if memory is None else memory.newest_complete_step()
    if (
        memory is None
        or found is None
        or found.step <= (-1 if checkpoint is None else Checkpoint.open_folder(checkpoint).step)
    ):
        return None
    logger.info("resuming from copies in host memory, of step %d on %d rank(s)", found.step, found.ranks)
    if found.ranks == memory.rank_count and _has_saved_settings(config, found.state):
        return memory.fetch_local_copy(found)
    assets = Path(config.output) / "assets"
    model = ModelConfig.parse(found.state["settings"]["model"])
    made = save_sharded_checkpoint(
        config.checkpoint_root, found.step, memory.get_checkpoint_shares_of_copies(found), model=model, state=found.state,
        assets=assets if assets.exists() else None,
    )  # fmt: skip
    memory.remove_run_copies()
    return made


def _has_saved_settings(config: RunConfig, state: Mapping[str, Any]) -> bool:
    """Return whether a run resumed from that state has the settings it was saved with."""
    settings = inherit_data_order(config, state).model_dump(mode="json", by_alias=True)
    if config.train.epochs is not None:  # converted to steps once the data is open
        settings["train"]["steps"] = state["settings"]["train"]["steps"]
    return bool(settings == state["settings"])


def read_saved_state(start: Location | TrainingStateCopy | None) -> Mapping[str, Any]:
    """Return the JSON state of the checkpoint or memory copy `start`; empty for None, a new run."""
    if isinstance(start, TrainingStateCopy):
        return start.state
    return {} if start is None else Checkpoint.open_folder(start).trainer_state


def inherit_data_order(config: RunConfig, saved: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with the data order and read positions of the checkpoint that the run resumes from.
    `saved` is the state of the checkpoint; the configuration is unchanged for an empty state, a new run.

    Raises:
        DataError: when a glob of data sets matches no file.
    """
    if "data" in saved.get("settings", {}):
        position = SkippedSampleRanges.from_checkpoint_state(saved).data_position(saved["consumed_samples"])
        data = resume_data_config(config.data, saved["settings"]["data"], position, saved.get("read"))
        streamed = {path: StreamPosition.model_validate(at) for path, at in saved.get("streamed", {}).items()}
        data = data.model_copy(update={"streamed": streamed if data.stream else {}})
    else:
        data = config.data.model_copy(update={"order": config.data.sample_order, "begun": None, "streamed": {}})
    return config.model_copy(update={"data": data})


def convert_epochs_to_steps(config: RunConfig, samples: float) -> RunConfig:
    """Return the configuration with `train.epochs` converted to steps, if set; one epoch has `samples` samples.

    Raises:
        ConfigError: when other settings do not fit this number of steps.
    """
    if config.train.epochs is None:
        return config
    steps = max(1, config.batch.steps_for_samples(math.ceil(config.train.epochs * samples)))
    raw = config.model_dump(mode="json", by_alias=True)
    logger.info("%g epoch(s) of %d samples are %d steps", config.train.epochs, samples, steps)
    return RunConfig.parse(
        {**raw, "train": {**raw["train"], "steps": steps}}, source=f"train.epochs = {config.train.epochs:g}"
    )
