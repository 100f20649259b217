"""Starting ranks on this machine, through the command."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import Store

from mega_ckpt.store import latest_checkpoint
from mega_common.errors import ConfigError, TrainingError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job.training_guard import StopSignalHandler
from mega_trainer.launch import local_ranks as ranks_module
from mega_trainer.launch.local_ranks import (
    _interpret_exit_codes,
    join_process_group,
    rank_from_environment,
    run_local_ranks,
    select_attempt_store,
    warn_unsafe_restarts,
)
from mega_trainer.run.training_run import run_training

Settings = Callable[..., dict[str, Any]]
PLACE = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_a_launched_rank_knows_its_place() -> None:
    assert rank_from_environment(PLACE) == RankInfo(3, 8, 1)
    assert rank_from_environment({"PATH": "/bin"}) is None
    with pytest.raises(ConfigError, match="found no MASTER_PORT"):
        rank_from_environment({name: value for name, value in PLACE.items() if name != "MASTER_PORT"})


def start(
    raw: dict[str, Any], path: Path, *options: str, program: Sequence[str] = ("mega_cli.main",), **variables: str
) -> subprocess.Popen[str]:
    path.write_text(yaml.safe_dump(raw))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", *program, "train", str(path), *options]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def trains(process: subprocess.Popen[str], output: Path) -> None:
    """Wait until it does."""
    metrics, deadline = output / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline, "it does not train"
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


@pytest.fixture
def long_run(settings: Settings, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Two ranks that train for as long as nobody stops them, and their folder."""
    raw = settings(train={"steps": 100_000}, parallel={"dp": 2}, batch={"micro": 1}, checkpoint={"every": 1000})
    raw["timeout_seconds"] = 8
    process = start(raw, tmp_path / "run.yaml")
    trains(process, Path(raw["output"]))
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
    assert "does not divide 3" in told


def everyone(process: subprocess.Popen[str]) -> list[int]:
    return [process.pid, *ranks_under(process).values()]


@pytest.mark.parametrize(
    ("number", "to"),
    [
        pytest.param(signal.SIGINT, lambda process: [process.pid], marks=pytest.mark.long),
        (signal.SIGTERM, everyone),
        (signal.SIGUSR1, lambda process: [ranks_under(process)[1]]),
    ],
)
def test_a_signal_saves_once_whoever_got_it_and_ends_with_status_75(
    long_run: tuple[subprocess.Popen[str], Path],
    number: signal.Signals,
    to: Callable[[subprocess.Popen[str]], list[int]],
) -> None:
    process, output = long_run
    for pid in to(process):
        os.kill(pid, number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 75, told
    saved = latest_checkpoint(output / "checkpoints")
    assert saved is not None
    assert told.count("run the same command again to resume") == 1
    assert f"saved step {int(saved.name[5:])} of 100000" in told
    assert "torch/distributed" not in told
    assert "error" not in told


def test_a_run_in_use_is_refused_and_its_ranks_end_with_their_launcher(
    long_run: tuple[subprocess.Popen[str], Path], settings: Settings
) -> None:
    process, output = long_run
    ranks = ranks_under(process)
    with pytest.raises(
        ConfigError, match=f"{output}: is in use by process {ranks[0]} on {socket.gethostname()} since 20"
    ):
        run_training(RunConfig.parse(settings()), RankInfo())
    process.kill()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in ranks.values()):
        assert time.monotonic() < deadline, "orphans train on"
        time.sleep(0.1)
    assert latest_checkpoint(output / "checkpoints") is not None


@pytest.mark.long
def test_a_killed_rank_is_named_and_ends_the_job(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, output = long_run
    os.kill(ranks_under(process)[1], signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"rank 1 on {socket.gethostname()} ended with signal 9" in told
    assert re.search(r"rank 0 on .*, step \d+: lost the connection to other ranks \(.*onnection", told), told
    assert "internal error" not in told
    assert "torch/distributed" not in told
    recorded = (output / "errors.jsonl").read_text()
    assert f'"error": "rank 1 on {socket.gethostname()} ended with signal 9 (SIGKILL)"' in recorded
    assert "lost the connection to other ranks" in recorded


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_rank_that_a_signal_killed_is_named_though_another_announced_an_error(
    number: signal.Signals, tmp_path: Path
) -> None:
    stop = StopSignalHandler(lambda _: None)
    with pytest.raises(TrainingError, match=rf"^rank 1 on .* ended with signal {number.value} \({number.name}\)"):
        _interpret_exit_codes({2: 1, 1: -number, 0: 1, 3: -signal.SIGTERM}, stop, tmp_path, announced=0)
    assert _interpret_exit_codes({0: 1, 1: -signal.SIGTERM}, stop, tmp_path, announced=0) == 1


@pytest.mark.long
def test_a_stopped_rank_0_is_named_and_ends_the_job(long_run: tuple[subprocess.Popen[str], Path]) -> None:
    process, _ = long_run
    os.kill(ranks_under(process)[0], signal.SIGSTOP)
    _, told = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "no progress for 8 seconds" in told
    assert re.search(r"rank 0 on .*, step \d+, was in", told.split("no progress")[1])


@pytest.mark.long
def test_a_stopped_rank_0_that_holds_the_store_ends_the_others(settings: Settings, tmp_path: Path) -> None:
    """As under torchrun with a store of the ranks' own, or with no launcher that has one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    raw = settings(train={"steps": 100_000}, batch={"micro": 1}) | {"timeout_seconds": 8}
    ranks = [start(raw, tmp_path / "run.yaml", **place, RANK=rank, LOCAL_RANK=rank) for rank in "01"]
    try:
        trains(ranks[0], Path(raw["output"]))
        ranks[0].send_signal(signal.SIGSTOP)
        _, told = ranks[1].communicate(timeout=90)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode == 1
    assert "rank 0 on 127.0.0.1, which holds the job's store, does not answer" in told


@pytest.mark.long
def test_torchrun_does_not_restart_what_was_asked_to_end(settings: Settings, tmp_path: Path) -> None:
    raw = settings(train={"steps": 100_000})
    torchrun = (
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        "--max-restarts=1",
        "-m",
        "mega_cli.main",
    )
    process = start(raw, tmp_path / "run.yaml", program=torchrun)
    try:
        trains(process, Path(raw["output"]))
        os.kill(ranks_under(process)[0], signal.SIGUSR1)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "SIGUSR1: saved step" in told
    assert "resuming from" not in told


@pytest.mark.parametrize(
    ("restarts", "shared", "machines", "warned"),
    [
        ("0", "True", "2", False),
        ("3", "False", "2", False),
        ("3", "True", "1", False),
        ("3", "True", "2", True),
    ],
)
def test_restarts_of_several_machines_into_a_shared_store_are_warned_of(
    restarts: str, shared: str, machines: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_unsafe_restarts({})
    warn_unsafe_restarts(
        {
            "TORCHELASTIC_MAX_RESTARTS": restarts,
            "TORCHELASTIC_USE_AGENT_STORE": shared,
            "GROUP_WORLD_SIZE": machines,
        }
    )
    assert ("requires --rdzv-backend=c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) == warned


def test_an_attempt_does_not_see_the_keys_of_earlier_ones() -> None:
    shared = HashStore()
    first, second, again = (
        select_attempt_store(shared, {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": count})
        for count in ("0", "1", "1")
    )
    first.set("key", "first")
    assert not second.check(["key"])
    second.set("key", "second")
    assert again.get("key") == b"second"
    assert select_attempt_store(shared, {"TORCHELASTIC_USE_AGENT_STORE": "False"}) is shared


def test_communicators_are_made_by_their_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device known from the start torch has all messages between two ranks on one stream (`pipeline/run.py`)."""
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(ranks_module, "rendezvous", lambda url: iter([(mock.Mock(spec=Store), 0, 2)]))
    monkeypatch.setattr(ranks_module, "PrefixStore", lambda prefix, store: store)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: said.append({"backend": backend, **more}))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with join_process_group(RankInfo(0, 2, 0), "auto", 600):
        pass
    assert said[0]["backend"] == "cpu:gloo,cuda:nccl"
    assert "device_id" not in said[0]


@pytest.mark.parametrize(("said", "threads"), [(None, "2"), ("3", "3")])
def test_local_ranks_share_the_cores(
    said: str | None, threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    if said:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    tells = "import os, pathlib, sys; pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['OMP_NUM_THREADS'])"
    assert run_local_ranks([sys.executable, "-c", tells, str(tmp_path)], 2, tmp_path) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == [threads, threads]


MEETINGS: dict[str, tuple[Exception, bool]] = {  # what the meeting of all ranks raises, and whether it is about other ranks
    "a store that waits": (dist.DistStoreError("wait timeout after 20000ms, keys: /attempt-1/groups/0//cpu//0/3"), True),
    "a store that is gone": (dist.DistNetworkError("Broken pipe"), True),
    "a store that is not there": (dist.DistNetworkError("The client socket has timed out after 1000ms"), True),
    "ranks that are missing": (dist.DistStoreError("Timed out after 21 seconds waiting for clients. 1/2 joined."), True),
    "gloo, closed": (RuntimeError("[/src/gloo/pair.cc:525] Connection closed by peer [10.0.0.2]:48784"), True),
    "gloo, refused": (RuntimeError("Gloo connectFullMesh failed with SO_ERROR: Connection refused"), True),
    "gloo, reset": (RuntimeError("Read error [10.0.0.2]:9: Connection reset by peer"), True),
    "NCCL": (dist.DistBackendError("NCCL error: remote process exited. More of it\nand a stack"), True),
    "another error": (RuntimeError("Expected all tensors to be on the same device"), False),
    "a mistake": (ValueError("invalid init method"), False),
}  # fmt: skip


@pytest.mark.parametrize(("error", "told"), MEETINGS.values(), ids=MEETINGS)
@pytest.mark.parametrize("place", ["rendezvous", "init_process_group", "first message"])
def test_ranks_that_do_not_meet_end_with_one_error(
    place: str, error: Exception, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **more: Any) -> Any:
        raise error

    monkeypatch.setattr(ranks_module, "rendezvous", lambda url: iter([(HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **more: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    begin: Callable[[], None] = fails if place == "first message" else lambda: None
    if place != "first message":
        monkeypatch.setattr(*((ranks_module, place) if place == "rendezvous" else (dist, place)), fails)
    with (
        pytest.raises(TrainingError if told else type(error)) as raised,
        join_process_group(RankInfo(1, 2, 1), "cpu", 600),
    ):
        begin()
    if told:
        assert re.match(
            r"rank 1 of 2 on \S+: the ranks of the job do not reach each other \(.+\)$",
            str(raised.value).splitlines()[0],
        )
        assert "stack" not in str(raised.value)
