"""Profiles of a run: what they hold, and that they change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run.training_run import run_training

Settings = Callable[..., dict[str, Any]]


def metrics(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]


def test_steps_are_profiled_and_numbers_stay(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plain = settings()
    looked_at = settings(output=str(tmp_path / "looked-at"), profile={"steps": [3, 4]})
    for raw in (plain, looked_at):
        run_training(RunConfig.parse(raw), RankInfo())
    same = ("step", "loss", "grad_norm")
    assert [[line[key] for key in same] for line in metrics(plain)] == [
        [line[key] for key in same] for line in metrics(looked_at)
    ]
    assert [line.keys() for line in metrics(plain)] == [line.keys() for line in metrics(looked_at)]
    folder = tmp_path / "looked-at/profile"
    assert {path.name for path in folder.iterdir()} == {"phases-rank0.jsonl", "trace-rank0-steps-3-4.json"}
    phases = [json.loads(line) for line in (folder / "phases-rank0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in phases] == [3, 4]
    for line in phases:
        parts = {name: line[name] for name in ("data", "forward", "backward", "reduce", "norm", "update")}
        assert all(seconds > 0 for seconds in parts.values())
        assert sum(parts.values()) <= line["seconds"]
    events = json.loads((folder / "trace-rank0-steps-3-4.json").read_text())["traceEvents"]
    named = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [named.count(name) for name in ("forward", "backward", "update")] == [4, 4, 2]
    assert "profile.memory has no effect without a GPU" in caplog.text
    assert not (Path(plain["output"]) / "profile").exists()


@pytest.mark.parametrize(
    ("profile", "steps"),
    [({"steps": [6, 9]}, [6]), ({"steps": [1, 2], "ranks": [1]}, None), ({"steps": [6, 6], "trace": False}, [6])],
)
def test_profiles_of_other_steps_and_ranks(
    settings: Settings, tmp_path: Path, profile: dict[str, Any], steps: list[int] | None
) -> None:
    run_training(RunConfig.parse(settings(profile=profile)), RankInfo())
    path = tmp_path / "run/profile/phases-rank0.jsonl"
    assert path.exists() == (steps is not None)
    if steps is not None:
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == steps
        assert any(path.parent.glob("trace-*")) == profile.get("trace", True)


@pytest.mark.parametrize(
    ("steps", "words"), [([4, 3], "the first and the last"), ([7, 8], "must start at or before train.steps = 6")]
)
def test_steps_that_cannot_be(settings: Settings, steps: list[int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig.parse(settings(profile={"steps": steps}))
