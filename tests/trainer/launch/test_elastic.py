from __future__ import annotations

import doctest
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega_trainer.launch import elastic

TERM, KILL = -signal.SIGTERM, -signal.SIGKILL


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        ([75], 75),
        ([75, 75, TERM], 75),  # the agent stopped one that had not ended yet
        ([TERM, 75], 75),
        ([2, 1], 2),
        ([75, 1], 1),  # the others lost this one
        ([KILL, 75, 1], 128 + 9),
        ([TERM], 128 + 15),
    ],
)
def test_the_status_is_that_of_the_ranks(codes: list[int], status: int) -> None:
    assert elastic.merge_exit_codes(codes) == status


def test_its_examples_hold() -> None:
    assert doctest.testmod(elastic).failed == 0


@pytest.fixture
def handlers() -> Iterator[None]:
    """torch's agent catches signals, and leaves it so."""
    before = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("status", [0, 2, 75])
def test_an_agent_ends_as_its_ranks_do(status: int, capfd: pytest.CaptureFixture[str]) -> None:
    ranks = ["--nproc-per-node=2", "--no-python", "sh", "-c", f"exit {status}"]
    assert elastic.main(["--standalone", *ranks]) == status
    assert ("FAILED" in capfd.readouterr().err) == (status == 2)


ENDS = """
import os
from mega_trainer.launch.local_ranks import terminate_torchrun
terminate_torchrun(os.environ, {status})
raise SystemExit({status})
"""


@pytest.mark.usefixtures("handlers")
def test_ranks_that_no_new_start_would_help_end_an_agent_that_restarts(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(ENDS.format(status=75))
    words = [
        sys.executable,
        "-m",
        "mega_trainer.launch.elastic",
        "--standalone",
        "--max-restarts=3",
        str(tmp_path / "rank.py"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run(words, env=environment, capture_output=True, check=False).returncode == 75


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    "number", [0, 1], ids=["the machine with the store waits", "the machine with the store is missing"]
)
def test_machines_with_fixed_numbers_that_do_not_meet_end_with_one_error(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """torchrun's static rendezvous, its default on several machines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = [f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}", "--rdzv-conf=timeout=1"]
    assert elastic.main(["--nnodes=2", *meeting, "--no-python", "true"]) == 1
    said = capfd.readouterr().err
    assert "error: the machines of the job do not reach each other at --master-addr (or --rdzv-endpoint): " in said
    assert "Traceback" not in said
