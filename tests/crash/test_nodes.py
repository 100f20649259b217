"""Runs of two nodes that meet with faults: each is named, ends or goes on as it should, in its time, with the same bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from crash.jobs import Job, Network, Settings, ended, networks, same_bits, settings_of, undisturbed

from mega_ckpt.store import latest_checkpoint, list_checkpoints

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
needs_networks = pytest.mark.skipif(not networks(), reason="needs to be allowed to make network namespaces")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Of two hosts."""
    with Network(f"mega-{os.getpid()}", 2) as made:
        yield made


@needs_networks
def test_each_fault_is_named_and_the_run_goes_on_with_the_same_bits(
    settings: Settings, tmp_path: Path, network: Network
) -> None:
    """A rank that is stopped, one that hangs, that raises, is killed, and is slow, one after the other."""
    undisturbed(settings_of(settings, tmp_path, "straight"), 2)
    raw = settings_of(settings, tmp_path, "hit", checkpoint={"memory_every": 1})
    faults = "0:1:3:stop 1:1:5:hang 2:0:7:raise 3:1:9:kill"
    with Job(raw, tmp_path / "job", nodes="2", ranks=1, network=network) as job:
        assert ended([job.launch(faults), job.launch(faults)]) == [0, 0], job.told()
        told, first = job.told(), job.told(0)
    assert re.findall(r"copies in host memory, of step (\d+)", told) == ["2", "4", "6", "8"]
    stopped, hung = (
        part.split("\n")[1]
        for part in first.split("error: no progress for 10 seconds (timeout_seconds); the job is ended")[1:]
    )
    assert re.match(r"  rank 1 on host1, step [123], was in ", stopped)
    assert hung.startswith("  rank 1 on host1, step 5, was in forward, at mega_trainer/pipeline/executor.py:")
    assert "    | crash/faulty.py:" in first
    assert "internal error: ValueError: planted\n  rank 0 on host0, step 7\n" in first
    assert "rank 1 on host1, step 7: lost the connection to other ranks" in told
    assert "rank 0 on host0, step 9: lost the connection to other ranks" in first
    assert same_bits(tmp_path / "straight", tmp_path / "hit")
    assert not list(Path("/dev/shm").glob("mega-*"))


@needs_networks
def test_a_node_that_is_cut_off_ends_and_the_other_goes_on_alone(
    settings: Settings, tmp_path: Path, network: Network
) -> None:
    fp64 = {"precision": "fp64", "train": {"steps": 72}, "checkpoint": {"every": 2}}
    raw = settings_of(settings, tmp_path, "cut", **fp64)
    with Job(raw, tmp_path / "job", nodes="1:2", ranks=1, wait=20, network=network) as job:
        launchers = [job.launch("0:0:1:slow"), job.launch()]
        job.tells("stragglers, for which")
        network.disconnect(1)
        begun = time.monotonic()
        assert launchers[1].wait(200) == 1, job.told()
        assert launchers[0].wait(200) == 0, job.told()
        told, other, lines = job.told(0), job.told(1), job.lines()
    assert time.monotonic() - begun < 200
    assert re.search(r"stragglers, for which the other ranks wait:\n  rank 0 on host0 works", told)
    assert "  rank 1 on host1, step " in told.split("no progress for 10 seconds")[1]
    assert "rank 0 on 10.77.0.1, which holds the job's store, does not answer" in other
    assert "error: a rank has ended, and the machine of --rdzv-endpoint does not answer" in other
    assert "on 1 rank(s), steps " in told
    expected = undisturbed(settings_of(settings, tmp_path, "straight", **fp64), 1)
    assert [line["step"] for line in lines] == list(range(1, 73))
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-10)


def test_a_lost_node_leaves_a_smaller_run_that_grows_again(settings: Settings, tmp_path: Path) -> None:
    """4 data ranks, then 2, from the copies in memory of all 4, and 4 again; loss and samples go on as if nothing had been."""
    fp64 = {"precision": "fp64", "train": {"steps": 30}, "checkpoint": {"memory_every": 2}}
    expected = undisturbed(settings_of(settings, tmp_path, "straight", **fp64), 4)
    faults = "0:2:5:node 0:3:5:kill 1:0:9:slow"
    with Job(settings_of(settings, tmp_path, "lost", **fp64), tmp_path / "job", nodes="1:2", ranks=2) as job:
        first, second = job.launch(faults), job.launch(faults)
        assert second.wait(200) == -9
        job.reaches(10)
        third = job.launch()
        assert ended([first, third]) == [0, 0], job.told()
        told, lines = job.told(), job.lines()
    assert "resuming from copies in host memory, of step 4 on 4 rank(s)" in told
    assert "on 2 rank(s), steps 5 to 30" in told
    assert len(re.findall(r"on 4 rank\(s\), steps \d+ to 30", told)) == 2
    assert [line["consumed_samples"] for line in lines] == [12 * step for step in range(1, 31)]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-10)


@pytest.mark.parametrize(
    ("nodes", "layout", "status", "words"),
    [
        ("1:2", {"dp": 4}, 2, "parallel.dp = 4: must be 2 on 2 ranks"),
        ("2", {}, 1, "error: --nnodes requires more machines than have joined"),
    ],
)
def test_a_node_that_never_comes_back_ends_a_run_that_cannot_do_without(
    settings: Settings, tmp_path: Path, nodes: str, layout: dict[str, int], status: int, words: str
) -> None:
    raw = settings_of(settings, tmp_path, "run", parallel=layout, checkpoint={"every": 3})
    with Job(raw, tmp_path / "job", nodes=nodes, ranks=2, wait=30) as job:
        faults = "0:2:5:node 0:3:5:kill"
        assert ended([job.launch(faults), job.launch(faults)]) == [status, -9], job.told()
        assert words in job.told(0)
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") is not None


FIRST_SEEN = (137, 1)  # torchrun gives the status of the rank whose end it sees first: the killed one's or its peer's
STATIC: dict[str, tuple[str, int, list[Any], str]] = {  # faults, --max-restarts, exit statuses, what the first node says
    "killed on the first": ("0:1:5:kill", 0, [FIRST_SEEN, 1], "lost the connection to other ranks"),
    "killed on the second": ("0:2:5:kill", 0, [1, FIRST_SEEN], "lost the connection to other ranks"),
    "killed on both in turn": ("0:0:5:kill 1:3:8:kill", 3, [0, 0], "requires --rdzv-backend=c10d"),
    "stopped": ("0:2:5:stop", 0, [1, 137], "no progress for 10 seconds"),
    "a machine lost": ("0:2:5:node 0:3:5:kill", 1, [1, -9], "the ranks of the job do not reach each other (wait timeout"),
    "the machine with the store lost": ("0:0:5:node 0:1:5:kill", 2, [-9, 1], ""),
}  # fmt: skip


@pytest.mark.parametrize("case", STATIC.values(), ids=STATIC)
def test_faults_under_torchruns_static_rendezvous_end_the_run_or_restart_it(
    settings: Settings, tmp_path: Path, case: tuple[str, int, list[Any], str]
) -> None:
    faults, restarts, statuses, words = case
    raw = settings_of(settings, tmp_path, "run", checkpoint={"every": 3})
    with Job(raw, tmp_path / "job", nodes="2", ranks=2, restarts=restarts, wait=20, static=True) as job:
        found = ended([job.launch(faults), job.launch(faults)])
        allowed = [status if isinstance(status, tuple) else (status,) for status in statuses]
        assert all(one in several for one, several in zip(found, allowed, strict=True)), (found, job.told())
        assert words in job.told(0)
        assert "internal error" not in job.told()
        assert "Traceback" not in job.told()
    if statuses == [0, 0]:
        undisturbed(settings_of(settings, tmp_path, "straight"), 4)
        assert same_bits(tmp_path / "straight", tmp_path / "run")
    elif statuses == [-9, 1]:
        assert "the machines of the job do not reach each other at --master-addr" in job.told(1)


def mega_train(run: Path) -> tuple[int, str]:
    """The command on two ranks: its exit status, and what it said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mega_cli.main", "train", str(run), "--nproc=2"]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "mega", str(folder)], check=False).returncode:
        pytest.skip("needs to be allowed to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_in_a_line_and_the_same_command_goes_on_when_there_is_room(
    settings: Settings, tmp_path: Path, disk: Path
) -> None:
    run, raw = (
        tmp_path / "run.yaml",
        settings_of(settings, tmp_path, "disk/run", checkpoint={"every": 2, "keep": 2, "async": True}),
    )
    run.write_text(yaml.safe_dump({**raw, "train": {"steps": 12, "exit_interval": 4}}))
    assert mega_train(run)[0] == 75
    free = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes((free.f_bavail - 8) * free.f_bsize))
    run.write_text(yaml.safe_dump(raw))
    status, told = mega_train(run)
    assert status == 2
    assert (
        len(re.findall(r"^error: .*/disk/run/checkpoints/.*: No space left on device\n  free space there", told, re.M))
        == 1
    ), told
    newest = latest_checkpoint(disk / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000004"
    assert sorted(os.listdir(newest.parent)) == [one.name for one in list_checkpoints(newest.parent)]
    (disk / "filler").unlink()
    assert mega_train(run)[0] == 0
    undisturbed({**raw, "output": str(tmp_path / "straight")}, 2)
    assert same_bits(tmp_path / "straight", disk / "run")
