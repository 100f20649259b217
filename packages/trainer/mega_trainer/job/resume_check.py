"""Checks of a run that resumes from a checkpoint with other settings: log lines and errors. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, flatten_settings

# Settings whose change alters the model.
MODEL_SETTINGS = ("model", "lora")
# Settings that determine sample number k of a data set; in Megatron's order the blend and the length of the run do as
# well, while in the others each data set continues with its next sample (`mega_data.sampling.staged_blend`).
ORDER_SETTINGS = ("data.split", "data.seq_length", "data.order", "data.kind", "data.long_documents", "train.seed")
LENGTH_SETTINGS = ("data.train", "train.steps", "batch.global", "batch.rampup", "batch.stages")
JUMP = 0.1  # share of the highest rate: smaller changes are accepted


def check_resume_settings(state: Mapping[str, Any], step: int, config: RunConfig, where: str) -> list[str]:
    """Return log lines about a resume from the checkpoint `where` of `step` with the saved `state`.

    Raises:
        ConfigError: when a setting of the model or the precision differs, or the learning rate would jump.
    """
    saved, consumed = state["settings"], state["consumed_samples"]
    found = check_setting_changes(saved, config, where)
    precision, compatible = saved.get("precision", config.precision), {"bf16", "fp8"}  # with equal weights and state
    if precision != config.precision and not {precision, config.precision} <= compatible:
        raise ConfigError(
            f"precision = {config.precision} conflicts with that of the resumed checkpoint {where}, {precision}",
            hint=f"set precision={precision}; or set init_from={where} and another output to start from its weights only",
        )
    if step >= config.train.steps:
        return found
    order = [*ORDER_SETTINGS, *(LENGTH_SETTINGS if config.data.sample_order == "megatron" else ())]
    if changed := [key for key in order if any(line.startswith((f"{key}:", f"{key}.")) for line in found)]:
        found.append(
            f"{' and '.join(changed)} changed the order of samples, which is read from sample {consumed} on; some samples are "
            "read again, and some are never read"
        )
    return [*found, *_lr_change_lines(saved, consumed, config, where)]


def check_setting_changes(saved: Mapping[str, Any], config: RunConfig, where: str) -> list[str]:
    """Return the settings of a run that differ from the checkpoint's saved ones, each as `path: old -> new`.

    Raises:
        ConfigError: when a setting of the model differs.
    """
    of_model, others = diff_run_settings(saved, config)
    if of_model and not config.checkpoint.allow_changes:
        raise ConfigError(
            f"{where} was saved by another model:\n" + "\n".join(f"  {line}" for line in of_model),
            hint="set the saved values, start in another output folder, or set checkpoint.allow_changes=true",
        )
    return of_model + others


def diff_run_settings(saved: Mapping[str, Any], config: RunConfig) -> tuple[list[str], list[str]]:
    """Return the differences between a saved run's settings and `config`, as two lists of `path: old -> new`: changes
    of the model itself, and other changes.

    Each is a line `path: old -> new`. Sections that were not saved, as in a converted checkpoint, are not compared, and
    settings that did not exist yet had their defaults.
    """
    current = config.model_dump(mode="json", by_alias=True)
    with suppress(ValidationError):  # settings unknown to this version are compared as saved
        saved = _parse_saved(saved, config).model_dump(mode="json", by_alias=True, include={*saved})
    now, before = (
        flatten_settings({name: value for name, value in current.items() if name in saved}),
        flatten_settings(saved),
    )
    lines = {
        path: f"{path}: {before.get(path)!r} -> {now.get(path)!r}"
        for path in sorted(now.keys() | before.keys())
        if before.get(path) != now.get(path)
        and not path.startswith("data.begun")  # logged by `mega_data.sampling.staged_blend`
    }
    of_model = [line for path, line in lines.items() if path.split(".")[0] in MODEL_SETTINGS]
    return of_model, [line for line in lines.values() if line not in of_model]


def _parse_saved(saved: Mapping[str, Any], config: RunConfig) -> RunConfig:
    return RunConfig.model_validate({**config.model_dump(mode="json", by_alias=True), **saved})


def _lr_change_lines(saved: Mapping[str, Any], consumed: int, config: RunConfig, where: str) -> Iterator[str]:
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
        raise ConfigError(
            f"changed settings make a jump of {change} (resuming from {where})",
            hint=f"set lr_schedule.decay_steps={max(1, config.batch.steps_for_samples(curves[0].end))} to keep the end of the decay, or "
            "set checkpoint.allow_lr_jump=true",
        )
    yield change
