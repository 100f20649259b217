"""Replay of a step from the checkpoint before it, in a separate folder, compared bitwise with metrics.jsonl.

The manifest of a checkpoint holds its `provenance`: versions, commit, machine, ranks, and a fingerprint of the data; the
resolved run.yaml is part of its state.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mega_ckpt.checkpoint_folders import latest_checkpoint_until_step
from mega_ckpt.store import Checkpoint, Location
from mega_common.atomic_files import write_json_atomically
from mega_common.errors import CheckpointError, ConfigError
from mega_common.extension_loader import is_extension_path
from mega_common.strict_config import apply_config_overrides
from mega_trainer.config.run_config import RunConfig, flatten_settings
from mega_trainer.job.environment import describe_environment

COMPARED = (
    "consumed_samples",
    "tokens",
    "lr",
    "loss",
    "mtp_loss",
    "pair_loss",
    "grad_norm",
    "loss_scale",
)  # metrics that do not depend on the machine's speed


def collect_provenance(ranks: int, data: str) -> dict[str, Any]:
    """Return the provenance of a run: the machine, software and data that its results depend on.
    It has machine and package versions, the git commit of the source, the number of `ranks`, and `data`, the
    fingerprint of the training data.
    """
    return {**describe_environment(), "commit": get_source_git_commit(), "ranks": ranks, "data": data}


def get_source_git_commit() -> str | None:
    """Return the git commit of mega's running source, with `+` if it has changes; None for an installed package."""

    def run_git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return run_git("rev-parse", "HEAD") + (
            "+" if run_git("status", "--porcelain", "--untracked-files=no", ".") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def diff_setting_values(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ between `saved` and `now`, each as `path: old -> new`."""
    before, after = flatten_settings(saved), flatten_settings(now)
    return [
        f"{path}: {before.get(path)} -> {after.get(path)}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]


def make_replay_run(config: RunConfig, step: int) -> tuple[RunConfig, Location | None]:
    """Return the configuration that repeats a run up to a recorded step, and the checkpoint to start from, if any.

    Raises:
        ConfigError: when the run has not recorded that step.
    """
    recorded = read_recorded_steps(Path(config.output))
    if step not in recorded:
        raise ConfigError(
            f"{config.output}/metrics.jsonl has no record of step {step}",
            hint=f"use a step from {min(recorded)} to {max(recorded)}" if recorded else "train the run first",
        )
    found = latest_checkpoint_until_step(config.checkpoint_root, step - 1)
    return _single_step_run(config, found, step), found


def make_reproduction_run(checkpoint: Location, overrides: list[str]) -> RunConfig:
    """Return the configuration of a run that repeats the one step after a checkpoint, by the settings saved in it.

    Raises:
        CheckpointError: when it holds no settings (a converted checkpoint), or is of the last step.
        ConfigError: when its settings with the overrides are not valid.
    """
    saved = Checkpoint.open_folder(checkpoint)
    if "settings" not in saved.trainer_state:
        raise CheckpointError(f"{checkpoint} holds weights without settings, and cannot be replayed")
    settings = saved.trainer_state["settings"]
    installed = [name for name in settings.get("extensions", ()) if not is_extension_path(name)]
    # a file is loaded only if an override names it
    raw = apply_config_overrides({**settings, "extensions": installed}, overrides)
    config = RunConfig.parse(raw, source=str(checkpoint))
    if saved.step >= config.train.steps:
        raise CheckpointError(
            f"{checkpoint} is of the last step, {saved.step}",
            hint="use an earlier checkpoint, or --set train.steps=...",
        )
    return _single_step_run(config, checkpoint, saved.step + 1)


def _single_step_run(config: RunConfig, checkpoint: Location | None, step: int) -> RunConfig:
    """Return a run that writes only to the folder `replay` and ends after that step."""
    raw = config.model_dump(mode="json", by_alias=True)
    raw["train"] |= {"exit_interval": step, "exit_after_minutes": None}
    raw["checkpoint"] |= {"load": checkpoint and str(checkpoint), "path": None, "save": False, "allow_lr_jump": True}
    raw["log"] = {"tensorboard": False}  # no tracker gets a step twice
    return RunConfig.parse({**raw, "profile": None, "output": str(Path(config.output) / "replay")})


def write_replay_yaml(config: RunConfig) -> Path:
    """Write replay.yaml, a replay run's settings as JSON, remove its folder's earlier metrics, and return the path."""
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    path = folder / "replay.yaml"
    write_json_atomically(path, config.model_dump(mode="json", by_alias=True, exclude_none=True))
    return path


def read_recorded_steps(output: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of `metrics.jsonl` in a run's folder by step.
    A line that a kill has cut short is left out; the result is empty when there are none.
    """
    try:
        text = (output / "metrics.jsonl").read_text(encoding="utf-8")
    except OSError:
        return {}
    whole = (json.loads(line) for line in text.splitlines() if line.endswith("}"))
    return {line["step"]: line for line in whole}


def compare_replayed_steps(
    recorded: Mapping[int, dict[str, Any]], again: Mapping[int, dict[str, Any]]
) -> Iterator[tuple[str, bool]]:
    """Yield (line of text, whether the metrics are bitwise the recorded ones; True if none were) of each replayed step.
    `again` has the replayed steps and `recorded` the recorded ones.
    """
    for step, line in again.items():
        if step not in recorded:
            yield f"step {step}: loss {line['loss']}, grad_norm {line['grad_norm']}; not recorded before", True
            continue
        before = recorded[step]
        changed = [key for key in COMPARED if before.get(key) != line.get(key)]
        if changed:
            yield (
                f"step {step}: " + ", ".join(_format_change(key, before.get(key), line.get(key)) for key in changed),
                False,
            )
        else:
            yield f"step {step}: loss {line['loss']}, grad_norm {line['grad_norm']}: the same bits", True


def _format_change(key: str, before: float | None, now: float | None) -> str:
    """Return a text with both values of a metric and their bits; JSON keeps all digits of a float."""
    if before is None or now is None:
        return f"{key} was {before} and is {now}"
    old, new = float(before), float(now)
    return f"{key} was {old!r} ({old.hex()}) and is {new!r} ({new.hex()}), by {abs(new - old) / (abs(old) or 1):.1e}"
