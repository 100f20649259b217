"""Settings of a stage's run.yaml, compared by value, and the effect of a change on finished work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_cli.workflow_config import WorkflowStage
from mega_common.strict_config import apply_overrides, load_yaml_mapping

FlatSettings = dict[str, Any]

# What a trained model does not depend on, but for rounding; and what of that it does depend on.
WITHOUT_EFFECT = (
    "parallel", "recompute", "offload", "profile", "batch.micro", "optimizer.offload", "data.cache", "device", "timeout_seconds", "log",
    "debug", "train", "checkpoint",
)  # fmt: skip
DECISIVE = ("train.steps", "train.seed", "checkpoint.path", "checkpoint.load")


@dataclass(frozen=True)
class StageVerdict:
    """Why a stage must run, and whether it resumes (`start_over` False) or starts from nothing."""

    reason: str
    start_over: bool


def stage_settings(stage: WorkflowStage, base: Path) -> FlatSettings | None:
    """Return every setting of the run.yaml that a stage is given, with its `--set` options applied, or None without
    one.

    Raises:
        ConfigError: with everything that is wrong with it.
    """
    if stage.run_config_path is None:
        return None
    from mega_trainer.config.run_config import (  # here: a workflow of other commands needs no trainer
        RunConfig,
        resolve_run_config,
    )

    file = base / stage.run_config_path
    raw = apply_overrides(load_yaml_mapping(file), stage.setting_overrides)
    config = RunConfig.parse(resolve_run_config(raw, base=base), source=str(file))
    settings = config.model_dump(mode="json", by_alias=True)
    settings["lr_schedule"]["decay_steps"] = config.lr_schedule.decay_steps or config.train.steps
    return settings


def referenced_files(settings: FlatSettings) -> list[str]:
    """Return what a run reads beside its run.yaml: token data sets, a tokenizer, weights or a checkpoint to start from."""
    from mega_data.token_files.indexed_reader import get_bin_path, get_idx_path, list_companion_files  # here, as above

    data = settings["data"]
    sets = [Path(source["path"]) for split in ("train", "valid", "test") for source in data[split] or ()]
    read = [
        str(path)
        for one in sets
        for path in (get_bin_path(one), get_idx_path(one), *list_companion_files(one).values())
    ]
    others = (data["tokenizer"], settings["init_from"], settings["checkpoint"]["load"])
    return read + [name for name in others if name]


def judge_settings_change(
    stage: WorkflowStage, before: FlatSettings | None, now: FlatSettings | None, *, done: bool
) -> StageVerdict | None:
    """Return the effect of changed settings on the work of a stage, or None if there is none.

    Training goes on from its checkpoints under other settings while it has steps to do, unless as another model.
    What was trained to its end under other settings is not the model that is asked for.
    """
    changed = {
        path: values for path, values in changed_settings(before or {}, now or {}).items() if _matters(stage, path)
    }
    if not changed:
        return None
    told = ", ".join(f"{path}: {old!r} -> {new!r}" for path, (old, new) in list(changed.items())[:3])
    others = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
    another_model = any(path.split(".")[0] == "model" for path in changed)
    old_steps, new_steps = changed.get("train.steps", (0, 0))
    goes_on = stage.run == "train" and not another_model and (not done or new_steps > old_steps)
    return StageVerdict(told + others, start_over=not goes_on)


def _matters(stage: WorkflowStage, path: str) -> bool:
    free = any(f"{path}.".startswith(f"{section}.") for section in WITHOUT_EFFECT)
    return stage.run != "train" or path in DECISIVE or not free


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by path: their old and new value, None for a missing one."""
    old, new = _flat(before), _flat(now)
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    return {path: (old.get(path), new.get(path)) for path in paths}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    return {p: v for key, item in value.items() for p, v in _flat(item, f"{path}.{key}".strip(".")).items()}
