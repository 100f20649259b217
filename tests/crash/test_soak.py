"""Runs under torchrun that meet with faults, two launchers on this machine as two nodes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mega_ckpt.store import Checkpoint, latest
from mega_trainer.config import RunConfig
from mega_trainer.ranks import Ranks
from mega_trainer.repeat import recorded_steps
from mega_trainer.train import run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
FAULTY = Path(__file__).parent / "faulty.py"
Settings = Callable[..., dict[str, Any]]


class Job:
    """Launchers, each a node, that train one run together."""

    def __init__(self, raw: dict[str, Any], folder: Path, *, nodes: str, ranks: int, restarts: int = 5) -> None:
        folder.mkdir()
        self.folder, self.output = folder, Path(raw["output"])
        (folder / "run.yaml").write_text(yaml.safe_dump(raw))
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        self._options = [
            f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{port}", f"--rdzv-id={folder.name}-{port}", "--monitor-interval=0.2",
        ]  # fmt: skip
        self._launchers: list[subprocess.Popen[bytes]] = []

    def launch(self, faults: str = "") -> subprocess.Popen[bytes]:
        """Start a node; the first one holds the meeting."""
        host = f"--rdzv-conf=is_host={int(not self._launchers)},join_timeout=60,last_call_timeout=2"
        command = [sys.executable, "-m", "mega_trainer.elastic", *self._options, host, str(FAULTY), "run.yaml"]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "OMP_NUM_THREADS": "1",
            "FAULTS": faults, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        with open(self.folder / f"node-{len(self._launchers)}.log", "wb") as log:
            self._launchers.append(
                subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
        return self._launchers[-1]

    def told(self) -> str:
        """What all nodes have said."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("node-*.log")))

    def lines(self) -> list[dict[str, Any]]:
        """Of the run's metrics."""
        return list(recorded_steps(self.output).values())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self._launchers:
            launcher.kill()
            launcher.wait()


def settings_of(settings: Settings, tmp_path: Path, name: str, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"batch": {"micro": 1, "global": 12}, "train": {"steps": 12}, "precision": "bf16"}
    return settings(**{**base, **sections}, timeout_seconds=10, output=str(tmp_path / name))


def same_bits(one: Path, other: Path) -> bool:
    first, second = (Checkpoint.open(found) for output in (one, other) if (found := latest(output / "checkpoints")))
    keys = list(first.keys())
    return keys == list(second.keys()) and all(torch.equal(first.read(key), second.read(key)) for key in keys)


def ended(launchers: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [launcher.wait(400) for launcher in launchers]


def test_killed_ranks_of_two_nodes_go_on_from_copies_in_memory_with_the_same_bits(
    settings: Settings, tmp_path: Path
) -> None:
    straight = settings_of(settings, tmp_path, "straight")
    with Job(straight, tmp_path / "undisturbed", nodes="1", ranks=2) as job:
        assert ended([job.launch()]) == [0]
    raw = settings_of(settings, tmp_path, "killed", checkpoint={"memory_every": 2})
    with Job(raw, tmp_path / "job", nodes="2", ranks=1) as job:
        faults = "0:1:6:kill 1:0:9:kill"
        assert ended([job.launch(faults), job.launch(faults)]) == [0, 0], job.told()
        told = job.told()
    assert told.count("going on from the copies in memory, of step 4") == 1
    assert told.count("going on from the copies in memory, of step 8") == 1
    assert same_bits(tmp_path / "straight", tmp_path / "killed")
    assert not list(Path("/dev/shm").glob("mega-*"))


def test_a_rank_that_hangs_in_a_forward_is_named_with_its_stack_and_started_again(
    settings: Settings, tmp_path: Path
) -> None:
    raw = settings_of(settings, tmp_path, "hung", checkpoint={"memory_every": 1})
    with Job(raw, tmp_path / "job", nodes="1", ranks=3) as job:
        assert ended([job.launch("0:1:5:hang")]) == [0], job.told()
        told = job.told()
    blamed = told.split("error: no progress for 10 seconds; the job is ended\n")[1]
    assert blamed.startswith("  rank 1 on ")
    assert "step 5, was in forward, at mega_trainer/pipeline/run.py:" in blamed.splitlines()[0]
    assert "    | crash/faulty.py:" in blamed
    assert "  rank 0 on" not in told
    assert "going on from the copies in memory, of step 4" in told


def test_a_lost_node_leaves_a_smaller_run_and_a_layout_that_cannot_be_is_refused_at_once(
    settings: Settings, tmp_path: Path
) -> None:
    """4 data ranks, then 2, and 4 again; consumed samples and loss go on as if nothing had been."""
    fp64 = {"precision": "fp64", "train": {"steps": 30}, "checkpoint": {"every": 3}}
    straight = settings_of(settings, tmp_path, "straight", **fp64)
    with Job(straight, tmp_path / "undisturbed", nodes="1", ranks=4) as job:
        assert ended([job.launch()]) == [0]
        expected = job.lines()
    faults = "0:2:5:node 0:3:5:kill 1:0:9:slow"
    with Job(settings_of(settings, tmp_path, "lost", **fp64), tmp_path / "job", nodes="1:2", ranks=2) as job:
        first, second = job.launch(faults), job.launch(faults)
        assert second.wait(120) == -9
        deadline = time.monotonic() + 120
        while len(job.lines()) < 10:
            assert time.monotonic() < deadline, job.told()
            time.sleep(0.2)
        third = job.launch()
        assert ended([first, third]) == [0, 0], job.told()
        told, lines = job.told(), job.lines()
    for ranks in (2, 4):
        assert f"on {ranks} rank(s), steps " in told
    assert [line["consumed_samples"] for line in lines] == [12 * step for step in range(1, 31)]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-10)
    fixed = settings_of(settings, tmp_path, "fixed", parallel={"dp": 4}, checkpoint={"every": 3})
    with Job(fixed, tmp_path / "refused", nodes="1:2", ranks=2) as job:
        launchers = [job.launch(faults), job.launch(faults)]
        assert ended(launchers) == [2, -9]
        assert job.told().count("parallel.dp = 4: 2 ranks make dp = 2") <= 2  # by each of two ranks, once


PLAN = [  # ranks, what befalls them, and after which step they end
    (4, "0:2:61:kill 1:0:98:raise 2:3:121:hang", 150),
    (2, "0:1:190:kill", 260),
    (3, "0:1:333:kill 1:2:371:kill", None),
]
INTERVAL = 10


def soaked(raw: dict[str, Any], folder: Path, *, faults: bool) -> str:
    """The run in one layout after the other; returns what was told."""
    folder.mkdir()
    told = []
    for number, (ranks, planted, end) in enumerate(PLAN):
        part = {**raw, "train": {**raw["train"], "exit_interval": end}}
        with Job(part, folder / str(number), nodes="1", ranks=ranks) as job:
            status = ended([job.launch(planted if faults else "")])
            assert status == [75 if end else 0], job.told()
            told.append(job.told())
    return "\n".join(told)


def test_400_steps_with_faults_in_changing_layouts_have_the_bits_of_an_undisturbed_run(
    settings: Settings, tmp_path: Path
) -> None:
    """Bit for bit those of the same layouts without a fault; of one process up to rounding."""
    parts: dict[str, Any] = {"precision": "fp64", "train": {"steps": 400}, "checkpoint": {"memory_every": INTERVAL}}
    told = soaked(settings_of(settings, tmp_path, "soaked", **parts), tmp_path / "faults", faults=True)
    soaked(settings_of(settings, tmp_path, "quiet", **parts), tmp_path / "none", faults=False)
    assert same_bits(tmp_path / "quiet", tmp_path / "soaked")
    run(RunConfig.parse(settings_of(settings, tmp_path, "alone", **parts)), Ranks())
    expected, lines = (recorded_steps(tmp_path / name).values() for name in ("alone", "soaked"))
    assert [line["consumed_samples"] for line in lines] == [12 * step for step in range(1, 401)]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-9)
    bad = [int(fault.split(":")[2]) for _, planted, _ in PLAN for fault in planted.split()]
    back = [int(step) for step in re.findall(r"copies in memory, of step (\d+)", told)]
    assert len(back) == len(bad)
    assert all(0 <= fault - 1 - step <= INTERVAL for fault, step in zip(bad, back, strict=True))
