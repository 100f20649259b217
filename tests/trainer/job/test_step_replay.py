"""A step made again from the command line: the same bits, or told which are not, and what else differs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mega_ckpt.store import Checkpoint, list_checkpoints
from mega_cli.main import main
from mega_trainer.config.run_config import RunConfig
from mega_trainer.job.step_replay import compare_replayed_steps, diff_setting_values, make_replay_run

Settings = Callable[..., dict[str, Any]]


def command(*words: str) -> int:
    try:
        main(["train", *words])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def run(settings: Settings, tmp_path: Path) -> Path:
    """A run.yaml that has been trained: 5 steps, with checkpoints at 2 and 4."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings(train={"steps": 5}, checkpoint={"every": 2}, model=model())))
    assert command(str(path)) == 0
    return path


def model() -> dict[str, Any]:
    from trainer.conftest import MODEL

    return {**MODEL, "residual_dropout": 0.1}


def changed(metrics: Path, step: int, key: str, factor: float) -> None:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[step - 1][key] *= factor
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_replay_has_the_same_bits_and_leaves_the_run_as_it_is(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = metrics.read_bytes(), [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    for step, lines in ((4, 2), (1, 1)):  # from checkpoint 2, and from the first step
        capsys.readouterr()
        assert command(str(run), "--replay", str(step)) == 0
        told = capsys.readouterr().out
        assert told.count("the same bits") == lines
        assert f"step {step}: loss" in told
    assert (metrics.read_bytes(), [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")]) == before
    changed(metrics, 4, "grad_norm", 1 + 2**-52)
    assert command(str(run), "--replay", "4") == 1
    assert "step 4: grad_norm was " in (told := capsys.readouterr().out)
    assert re.search(r"by [1-4]\.\de-16", told)
    assert told.count("the same bits") == 1
    assert command(str(run), "--replay", "6") == 2
    assert "metrics.jsonl has no record of step 6\n  use a step from 1 to 5" in capsys.readouterr().err


def test_a_checkpoint_is_reproduced_and_what_differs_is_told_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second, _, last = list_checkpoints(tmp_path / "run" / "checkpoints")
    made_with = Checkpoint.open_folder(second).manifest.provenance
    assert {"versions", "commit", "machine", "host", "ranks", "data"} <= made_with.keys()
    run.unlink()
    assert command("--reproduce", str(second)) == 0
    told = capsys.readouterr().out
    assert "versions, commit, machine, ranks and data are the same\nstep 3: loss" in told
    assert command("--reproduce", str(second), "--set", "train.seed=7") == 1
    assert "differs: data: " in (told := capsys.readouterr().out)
    assert "step 3: loss was " in told
    assert command("--reproduce", str(last)) == 2
    assert "is of the last step, 5" in capsys.readouterr().err
    assert command("run.yaml", "--reproduce", str(second)) == 2


def test_a_replay_sends_nothing_to_the_trackers_of_the_run(settings: Settings, tmp_path: Path) -> None:
    trackers = {"wandb": "a", "mlflow": "b", "trackio": "c", "prometheus_port": 9000, "tensorboard": True}
    config = RunConfig.parse(settings(log=trackers))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    replayed, _ = make_replay_run(config, 1)
    assert not any(getattr(replayed.log, name) for name in trackers)


def test_numbers_are_compared_in_all_their_bits() -> None:
    one = {"loss": 1.5, "grad_norm": None, "seconds": 1.0}
    assert list(compare_replayed_steps({3: one}, {3: {**one, "seconds": 2.0}})) == [
        ("step 3: loss 1.5, grad_norm None: the same bits", True)
    ]
    ((line, same),) = compare_replayed_steps({3: one}, {3: {**one, "loss": 1.75, "grad_norm": 2.0}})
    assert not same
    assert "loss was 1.5 (0x1.8000000000000p+0) and is 1.75 (0x1.c000000000000p+0), by 1.7e-01" in line
    assert "grad_norm was None and is 2.0" in line


def test_what_a_checkpoint_was_made_with_is_compared_path_by_path() -> None:
    assert diff_setting_values({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == [
        "a.c: 2 -> 3",
        "d: None -> 4",
    ]
