"""Starting ranks on this machine, through the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mega_ckpt.store import latest
from mega_common.errors import ConfigError
from mega_trainer.ranks import Ranks, ranks_of

Settings = Callable[..., dict[str, Any]]
PLACE = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_a_launched_rank_knows_its_place() -> None:
    assert ranks_of(PLACE) == Ranks(3, 8, 1)
    assert ranks_of({"PATH": "/bin"}) is None
    with pytest.raises(ConfigError, match="but not MASTER_PORT"):
        ranks_of({name: value for name, value in PLACE.items() if name != "MASTER_PORT"})


def start(raw: dict[str, Any], path: Path, *options: str) -> subprocess.Popen[str]:
    path.write_text(yaml.safe_dump(raw))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mega_cli.main", "train", str(path), *options]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def long_run(settings: Settings, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Two ranks that train for as long as nobody stops them, and their folder."""
    raw = settings(train={"steps": 100_000}, parallel={"dp": 2}, batch={"micro": 1}, checkpoint={"every": 1000})
    raw["timeout_seconds"] = 8
    process = start(raw, tmp_path / "run.yaml")
    metrics, deadline = Path(raw["output"]) / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline, "it does not train"
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    yield process, Path(raw["output"])
    process.kill()


def ranks_under(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids of the ranks that a launcher started, by rank."""
    found = {}
    for child in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(part.split("=", 1) for part in (child / "environ").read_text().split("\0") if "=" in part)
            parent = int((child / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if parent == process.pid and "RANK" in variables:
            found[int(variables["RANK"])] = int(child.name)
    return found


def test_two_ranks_train_and_one_goes_on(settings: Settings, tmp_path: Path) -> None:
    raw = settings(train={"steps": 3}, parallel={"tp": 2}, precision="fp64", lr_schedule={"decay_steps": 6})
    first = start(raw, tmp_path / "run.yaml")  # two ranks, since the layout asks for two
    _, told = first.communicate(timeout=120)
    assert first.returncode == 0, told
    assert told.count("2 rank(s)") == 1
    raw["train"], raw["parallel"] = {"steps": 6}, {}
    second = start(raw, tmp_path / "run.yaml")
    _, told = second.communicate(timeout=120)
    assert second.returncode == 0, told
    assert "parallel.tp: 2 -> 1" in told
    lines = [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_ranks_that_do_not_fit_are_told_before_any_starts(settings: Settings, tmp_path: Path) -> None:
    process = start(settings(parallel={"tp": 2}), tmp_path / "run.yaml", "--nproc", "3")
    _, told = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "do not divide the 3 there are" in told


def test_a_signal_to_the_launcher_saves_and_ends_with_status_75(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, output = long_run
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 75, told
    assert latest(output / "checkpoints") is not None


def test_a_killed_rank_is_named_and_ends_the_job(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, _ = long_run
    os.kill(ranks_under(process)[1], signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 on" in told
    assert "signal 9" in told


def test_a_stopped_rank_is_named_and_ends_the_job(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, _ = long_run
    os.kill(ranks_under(process)[1], signal.SIGSTOP)
    _, told = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "no progress for 8 seconds" in told
    assert "rank 1 on" in told
    assert "step" in told.split("no progress")[1]
