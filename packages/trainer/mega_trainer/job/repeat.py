"""A step made once more: from the checkpoint before it, in a folder of its own, and compared bit by bit with its record.

What a checkpoint was made with (`provenance`) stands in its manifest: versions, commit, machine, ranks, and a fingerprint of
the data; the resolved run.yaml is part of its state.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mega_ckpt.folders import newest_until
from mega_ckpt.store import Checkpoint, Place
from mega_common.config import apply_overrides
from mega_common.errors import CheckpointError, ConfigError
from mega_common.files import write_json
from mega_trainer.config import RunConfig, flat
from mega_trainer.job.environment import described

COMPARED = (
    "consumed_samples",
    "tokens",
    "lr",
    "loss",
    "mtp_loss",
    "pair_loss",
    "grad_norm",
    "loss_scale",
)  # whatever the machine


def provenance(ranks: int, data: str) -> dict[str, Any]:
    """What a run is made with here: `described`, and `commit`, `ranks`, `data`, the fingerprint of what it reads."""
    return {**described(), "commit": commit(), "ranks": ranks, "data": data}


def commit() -> str | None:
    """Of the source tree that this is run from, `+` behind it where it was changed; None of an installed copy."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, each as `path: old -> new`."""
    before, after = flat(saved), flat(now)
    return [
        f"{path}: {before.get(path)} -> {after.get(path)}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]


def replayed(config: RunConfig, step: int) -> tuple[RunConfig, Place | None]:
    """The run that makes the steps up to `step` again, and the checkpoint it begins from; None: from the first step.

    Raises:
        ConfigError: when the run has not recorded that step.
    """
    recorded = recorded_steps(Path(config.output))
    if step not in recorded:
        raise ConfigError(
            f"{config.output}/metrics.jsonl has no line of step {step}",
            hint=f"it has those of {min(recorded)} to {max(recorded)}" if recorded else "train the run first",
        )
    found = newest_until(config.checkpoints, step - 1)
    return _again(config, found, step), found


def reproduced(checkpoint: Place, overrides: list[str]) -> RunConfig:
    """The run that makes the step after a checkpoint again, by the settings saved in it.

    Raises:
        CheckpointError: when it holds no settings, as a converted one, or was of the last step.
        ConfigError: when these settings, with the overrides, cannot be used.
    """
    saved = Checkpoint.open(checkpoint)
    if "settings" not in saved.state:
        raise CheckpointError(f"{checkpoint}: has weights alone, and no settings to make a step with")
    raw = apply_overrides(saved.state["settings"], overrides)
    config = RunConfig.parse(raw, source=str(checkpoint))
    if saved.step >= config.train.steps:
        raise CheckpointError(
            f"{checkpoint}: is of the last step, {saved.step}", hint="give an earlier one, or --set train.steps=..."
        )
    return _again(config, checkpoint, saved.step + 1)


def _again(config: RunConfig, checkpoint: Place | None, step: int) -> RunConfig:
    """It writes nothing where the run is but in the folder `replay`, and ends after that step."""
    raw = config.model_dump(mode="json", by_alias=True)
    raw["train"] |= {"exit_interval": step, "exit_after_minutes": None}
    raw["checkpoint"] |= {"load": checkpoint and str(checkpoint), "path": None, "save": False, "allow_lr_jump": True}
    raw["log"] |= {"every": 1, "tensorboard": False, "wandb": None}
    return RunConfig.parse({**raw, "profile": None, "output": str(Path(config.output) / "replay")})


def write_run(config: RunConfig) -> Path:
    """The run.yaml that starts it (JSON is YAML); its folder tells nothing of an earlier one."""
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    path = folder / "replay.yaml"
    write_json(path, config.model_dump(mode="json", by_alias=True, exclude_none=True))
    return path


def recorded_steps(output: Path) -> dict[int, dict[str, Any]]:
    """The lines of `metrics.jsonl` by step, but for one that a kill has cut short; empty when there are none."""
    try:
        text = (output / "metrics.jsonl").read_text(encoding="utf-8")
    except OSError:
        return {}
    whole = (json.loads(line) for line in text.splitlines() if line.endswith("}"))
    return {line["step"]: line for line in whole}


def compared(recorded: Mapping[int, dict[str, Any]], again: Mapping[int, dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Of each step made again: a line about it, and whether it has the same bits."""
    for step, line in again.items():
        if step not in recorded:
            yield f"step {step}: loss {line['loss']}, grad_norm {line['grad_norm']}; not recorded before", True
            continue
        before = recorded[step]
        changed = [key for key in COMPARED if before.get(key) != line.get(key)]
        if changed:
            yield f"step {step}: " + ", ".join(_change(key, before.get(key), line.get(key)) for key in changed), False
        else:
            yield f"step {step}: loss {line['loss']}, grad_norm {line['grad_norm']}: the same bits", True


def _change(key: str, before: float | None, now: float | None) -> str:
    """JSON keeps all digits of a float, so that its bits can be told."""
    if before is None or now is None:
        return f"{key} was {before} and is {now}"
    old, new = float(before), float(now)
    return f"{key} was {old!r} ({old.hex()}) and is {new!r} ({new.hex()}), by {abs(new - old) / (abs(old) or 1):.1e}"
