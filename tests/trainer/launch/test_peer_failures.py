"""A rank that raises while its peers wait in a collective, as under NCCL: its finalize waits, and so do the peers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

from mega_common.errors import TrainingError
from mega_trainer.launch import peer_failures
from mega_trainer.launch.local_ranks import run_local_ranks
from mega_trainer.launch.peer_failures import PeerFailureWatch

TIMEOUT = 20.0  # timeout_seconds of the job
# A lock that is taken twice: like a call of NCCL it returns for no signal, and other threads run meanwhile.
RANK = f"""
import ctypes, os, signal, sys
signal.alarm(120)  # a rank of a failed test ends, whatever it waits for
import torch.distributed as dist
from mega_cli.main import run_and_report_errors
from mega_common.progress_logging import configure_logging
from mega_trainer.distributed.comm import CommGroup, PendingCollective
from mega_trainer.launch.local_ranks import join_process_group, rank_from_environment

class Forever:
    def wait(self):
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)

def train():
    ranks = rank_from_environment(os.environ)
    configure_logging(rank=ranks.rank, world_size=ranks.world_size)
    with join_process_group(ranks, "cpu", {TIMEOUT}):
        dist.barrier()
        dist.destroy_process_group = Forever().wait
        if ranks.rank == int(sys.argv[1]):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        PendingCollective(Forever(), CommGroup("dp", (0, 1))).wait()

os._exit(run_and_report_errors(train))
"""
ERROR = "RuntimeError: CUDA error: an illegal memory access was encountered"


LAUNCHER = """
import os, sys
from pathlib import Path
from mega_cli.main import run_and_report_errors
from mega_trainer.launch.local_ranks import run_local_ranks
sys.exit(run_and_report_errors(lambda: sys.exit(run_local_ranks([sys.executable, *sys.argv[2:]], 2, Path(sys.argv[1])))))
"""


@pytest.mark.parametrize("raising", [0, 1])
def test_a_rank_that_raises_ends_the_job(raising: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), "-c", RANK, str(raising)]
    launcher = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, told = launcher.communicate(timeout=TIMEOUT + 10 + 60)  # and the start of a busy machine
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 1
    assert ("rank 1 on" in told) == (raising == 1)  # the launcher repeats what the screen did not show
    assert "signal 9" not in told
    assert ERROR in "\n".join(told.strip().splitlines()[-5:])


SLOW_TO_END = """
import os, time, traceback
from mega_trainer.launch.local_ranks import join_process_group, rank_from_environment

ranks = rank_from_environment(os.environ)
try:
    with join_process_group(ranks, "cpu", 20.0):
        if ranks.rank == 1:
            raise ValueError("the cause")
        time.sleep(1)  # rank 0 ends first, as one that has lost the connection
        os._exit(1)
except ValueError:
    traceback.print_exc()
    time.sleep(3)
    os._exit(1)
"""


def test_the_rank_with_the_first_error_is_named_also_if_it_ends_last(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as raised:
        run_local_ranks([sys.executable, "-c", SLOW_TO_END], 2, tmp_path)
    assert re.match(r"rank 1 on \S+ ended with exit status 1\n", str(raised.value))
    assert "ValueError: the cause" in str(raised.value)


@pytest.mark.parametrize("raising", [0, 1])
def test_ranks_of_any_launcher_end_with_the_one_that_raises(raising: int, tmp_path: Path) -> None:
    """Without a launcher that ends them, and with the store in rank 0, which may be the one that raises."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    base |= {"PYTHONPATH": os.pathsep.join(sys.path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(raising)], stderr=subprocess.PIPE, text=True,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told = [rank.communicate(timeout=TIMEOUT + 10 + 60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert ERROR in told[raising]
    peer = told[1 - raising]
    assert "error: this rank ends because another one has ended" in peer
    announced = f"rank {raising} on {socket.gethostname()} failed: {ERROR}"
    # rank 0 takes the store along, perhaps before its peer has read the announcement
    assert announced in peer or (raising == 0 and "the job's store has ended" in peer)


def test_the_first_failure_is_kept_and_a_rank_that_is_done_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store, ended = HashStore(), list[str]()
    monkeypatch.setattr(peer_failures, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(PeerFailureWatch, "_end_rank", lambda self, cause: ended.append(cause))
    first, second = PeerFailureWatch(store, 1), PeerFailureWatch(store, 2)
    first.announce_failure(ValueError("one"))
    second.announce_failure(ValueError("two"))
    assert store.get("failed").decode() == f"rank 1 on {socket.gethostname()} failed: ValueError: one"
    with PeerFailureWatch(store, 0):
        time.sleep(0.1)  # in its grace
    assert not ended
