"""The run.yaml of a stage counts by what it says: its settings, and what a change of them means for work done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mega_cli.workflow_config import Stage
from mega_common.config import apply_overrides, load_yaml

Settings = dict[str, Any]

# What a trained model does not depend on, but for rounding; and what of that it does depend on.
WITHOUT_EFFECT = (
    "parallel", "recompute", "offload", "profile", "batch.micro", "optimizer.offload", "data.cache", "device", "timeout_seconds", "log",
    "debug", "train", "checkpoint",
)  # fmt: skip
DECISIVE = ("train.steps", "train.seed", "checkpoint.path", "checkpoint.load")


@dataclass(frozen=True)
class Verdict:
    """Why a stage must run, and whether on what is there (`start_over` False) or from nothing."""

    reason: str
    start_over: bool


def settings_of(stage: Stage, base: Path) -> Settings | None:
    """Every setting of the run.yaml that a stage is given, with its `--set` on top; None where it is given none.

    Raises:
        ConfigError: with everything that is wrong with it.
    """
    if stage.run_file is None:
        return None
    from mega_trainer.config import RunConfig, resolve  # here: a workflow of other commands needs no trainer

    file = base / stage.run_file
    raw = apply_overrides(load_yaml(file), stage.overrides)
    config = RunConfig.parse(resolve(raw, base=base), source=str(file))
    settings = config.model_dump(mode="json", by_alias=True)
    settings["lr_schedule"]["decay_steps"] = config.lr_schedule.decay_steps or config.train.steps
    return settings


def named_files(settings: Settings) -> list[str]:
    """What a run reads beside its run.yaml: token data sets, a tokenizer, weights or a checkpoint to start from."""
    from mega_data.files.indexed import bin_path, idx_path, names_beside  # here, as above

    data = settings["data"]
    sets = [Path(source["path"]) for split in ("train", "valid", "test") for source in data[split] or ()]
    read = [str(path) for one in sets for path in (bin_path(one), idx_path(one), *names_beside(one).values())]
    others = (data["tokenizer"], settings["init_from"], settings["checkpoint"]["load"])
    return read + [name for name in others if name]


def settings_change(stage: Stage, before: Settings | None, now: Settings | None, *, done: bool) -> Verdict | None:
    """What it means for the work of a stage that its settings were others; None when it means nothing.

    Training goes on from its checkpoints under other settings while it has steps to do, unless as another model.
    What was trained to its end under other settings is not the model that is asked for.
    """
    changed = {path: values for path, values in differences(before or {}, now or {}).items() if _matters(stage, path)}
    if not changed:
        return None
    told = ", ".join(f"{path}: {old!r} -> {new!r}" for path, (old, new) in list(changed.items())[:3])
    others = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
    another_model = any(path.split(".")[0] == "model" for path in changed)
    old_steps, new_steps = changed.get("train.steps", (0, 0))
    goes_on = stage.run == "train" and not another_model and (not done or new_steps > old_steps)
    return Verdict(told + others, start_over=not goes_on)


def _matters(stage: Stage, path: str) -> bool:
    free = any(f"{path}.".startswith(f"{section}.") for section in WITHOUT_EFFECT)
    return stage.run != "train" or path in DECISIVE or not free


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, by path: their old and new value, None where there is none."""
    old, new = _flat(before), _flat(now)
    paths = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    return {path: (old.get(path), new.get(path)) for path in paths}


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    return {p: v for key, item in value.items() for p, v in _flat(item, f"{path}.{key}".strip(".")).items()}
