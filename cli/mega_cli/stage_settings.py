"""Settings of a stage's run.yaml, compared by value, and the effect of a change on finished work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_cli.workflow_config import WorkflowStage
from mega_common.strict_config import apply_overrides, load_yaml_mapping

FlatSettings = dict[str, Any]

# Settings without effect on the trained model except rounding, and exceptions from them.
WITHOUT_EFFECT = (
    "parallel", "recompute", "offload", "profile", "batch.micro", "optimizer.offload", "data.cache", "device", "timeout_seconds", "log",
    "debug", "train", "checkpoint",
)  # fmt: skip
DECISIVE = ("train.steps", "train.seed", "checkpoint.path", "checkpoint.load")


@dataclass(frozen=True)
class StageVerdict:
    """Reason why a workflow stage must run; with `start_over` it starts from nothing, else it resumes."""

    reason: str
    start_over: bool


def stage_settings(stage: WorkflowStage, base: Path) -> FlatSettings | None:
    """Return all settings of a workflow stage's run.yaml with its `--set` options applied, or None if the stage has no
    run.yaml.

    Raises:
        ConfigError: with all problems.
    """
    if stage.run_config_path is None:
        return None
    from mega_trainer.config.run_config import (  # here: workflows of other commands do not need the trainer
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
    """Return the files that the settings of a run.yaml name: token data sets, the tokenizer, and initial weights or
    checkpoint.
    """
    from mega_data.token_files.indexed_reader import get_bin_path, get_idx_path, list_companion_files  # here, as above

    data = settings["data"]
    prefixes = [Path(source["path"]) for split in ("train", "valid", "test") for source in data[split] or ()]
    read = [
        str(path)
        for prefix in prefixes
        for path in (get_bin_path(prefix), get_idx_path(prefix), *list_companion_files(prefix).values())
    ]
    others = (data["tokenizer"], settings["init_from"], settings["checkpoint"]["load"])
    return read + [name for name in others if name]


def judge_settings_change(
    stage: WorkflowStage, before: FlatSettings | None, now: FlatSettings | None, *, done: bool
) -> StageVerdict | None:
    """Return why a workflow stage must run after its run.yaml settings changed, or None if no changed setting affects
    its result.

    A training with remaining steps resumes from its checkpoints with the new settings, unless `model` changed. A finished
    training with other settings starts over.
    """
    changed = {
        path: values
        for path, values in changed_settings(before or {}, now or {}).items()
        if _affects_result(stage, path)
    }
    if not changed:
        return None
    reason = ", ".join(f"{path}: {old!r} -> {new!r}" for path, (old, new) in list(changed.items())[:3])
    others = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
    another_model = any(path.split(".")[0] == "model" for path in changed)
    old_steps, new_steps = changed.get("train.steps", (0, 0))
    resumes = stage.run == "train" and not another_model and (not done or new_steps > old_steps)
    return StageVerdict(reason + others, start_over=not resumes)


def _affects_result(stage: WorkflowStage, path: str) -> bool:
    without_effect = any(f"{path}.".startswith(f"{section}.") for section in WITHOUT_EFFECT)
    return stage.run != "train" or path in DECISIVE or not without_effect


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and new value of each setting that differs, by path; None for a missing value."""
    old, new = _flatten(before), _flatten(now)
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    return {path: (old.get(path), new.get(path)) for path in paths}


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    return {p: v for key, item in value.items() for p, v in _flatten(item, f"{path}.{key}".strip(".")).items()}
