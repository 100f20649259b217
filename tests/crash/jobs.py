"""Runs under torchrun: launchers on this machine, each a node, with a network between them where one is asked for."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from ranks import run_ranks

from mega_ckpt.store import Checkpoint, latest_checkpoint
from mega_common.errors import TrainingInterrupted
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job.step_replay import read_recorded_steps
from mega_trainer.run.training_run import run_training

FAULTY = Path(__file__).parent / "faulty.py"
Settings = Callable[..., dict[str, Any]]


class Network:
    """Hosts in network namespaces of their own, on one bridge, whose ports can be pulled."""

    def __init__(self, name: str, hosts: int) -> None:
        self._switch, self._hosts = f"{name}-switch", [f"{name}-{number}" for number in range(hosts)]

    def __enter__(self) -> Network:
        for name in (self._switch, *self._hosts):
            _ip("netns", "add", name)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for number, host in enumerate(self._hosts):
            port = f"port{number}"
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            self.connect(number)
            _ip("-n", self._switch, "link", "set", port, "up")
            _ip("-n", host, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self._switch, *self._hosts):
            subprocess.run(["ip", "netns", "del", name], check=False)

    def connect(self, host: int) -> None:
        """Its packets arrive."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge")

    def disconnect(self, host: int) -> None:
        """What it sends, or is sent, is lost without a word."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def address(self, host: int) -> str:
        """Of a host."""
        return f"10.77.0.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What begins a command on a host, which has a name of its own."""
        name = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
        return ["ip", "netns", "exec", self._hosts[host], "unshare", "--uts", "sh", "-c", name, f"host{host}"]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def networks() -> bool:
    """Whether this process may make them."""
    made = subprocess.run(["ip", "netns", "add", "mega-probe"], check=False, capture_output=True).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", "mega-probe"], check=False).returncode == 0


class Job:
    """Launchers, each a node, that train one run together."""

    def __init__(
        self, raw: dict[str, Any], folder: Path, *, nodes: str, ranks: int, restarts: int = 5, wait: int = 60,
        network: Network | None = None, static: bool = False,
    ) -> None:  # fmt: skip
        folder.mkdir()
        self._static = static  # torchrun's default: launchers have numbers, and ranks use the launchers' store
        self.folder, self.output, self._network, self._wait = folder, Path(raw["output"]), network, wait
        (folder / "run.yaml").write_text(yaml.safe_dump(raw))
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        where = "localhost" if network is None else network.address(0)
        meeting = [f"--master-addr={where}", f"--master-port={port}"]
        if not static:
            meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={where}:{port}", f"--rdzv-id={folder.name}-{port}"]
        self._options = [
            f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", *meeting, "--monitor-interval=0.2"
        ]  # fmt: skip
        self._launchers: list[subprocess.Popen[bytes]] = []

    def launch(self, faults: str = "") -> subprocess.Popen[bytes]:
        """Start a node; the first one holds the meeting."""
        number = len(self._launchers)
        meeting = f"is_host={int(not number)},join_timeout={self._wait},read_timeout={self._wait},last_call_timeout=2"
        own = [f"--rdzv-conf={meeting}"]
        if self._static:
            own = [f"--node-rank={number}", f"--rdzv-conf=timeout={self._wait}"]
        command = [sys.executable, "-m", "mega_trainer.launch.elastic", *self._options, *own]
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "OMP_NUM_THREADS": "1",
            "FAULTS": faults, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not self._static)), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "8",
        }  # fmt: skip
        if self._network is not None:
            command = [*self._network.inside(number), *command, f"--local-addr={self._network.address(number)}"]
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
        with open(self.folder / f"node-{number}.log", "wb") as log:
            started = subprocess.Popen(
                [*command, str(FAULTY), "run.yaml"], cwd=self.folder, env=environment, stdout=log, stderr=log
            )
        self._launchers.append(started)
        return started

    def told(self, node: int | None = None) -> str:
        """What a node has said, or all."""
        return "\n".join(
            path.read_text() for path in sorted(self.folder.glob(f"node-{'*' if node is None else node}.log"))
        )

    def lines(self) -> list[dict[str, Any]]:
        """Of the run's metrics."""
        return list(read_recorded_steps(self.output).values())

    def reaches(self, step: int) -> None:
        """Wait until a step is done."""
        self._until(lambda: any(line["step"] >= step for line in self.lines()))

    def tells(self, text: str) -> None:
        """Wait until a launcher or a rank has said so."""
        self._until(lambda: text in self.told())

    def _until(self, true: Callable[[], bool], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.2)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self._launchers:
            with contextlib.suppress(ProcessLookupError):
                launcher.kill()
            launcher.wait()


def settings_of(
    settings: Settings, tmp_path: Path, name: str, *, timeout_seconds: float = 10, **sections: Any
) -> dict[str, Any]:
    """A run of twelve steps."""
    base: dict[str, Any] = {"batch": {"micro": 1, "global": 12}, "train": {"steps": 12}, "precision": "bf16"}
    return settings(**{**base, **sections}, timeout_seconds=timeout_seconds, output=str(tmp_path / name))


def undisturbed(raw: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """The run on ranks of the test's own; returns the lines of its metrics."""
    run_ranks(_trained, ranks, raw, timeout=300)
    return list(read_recorded_steps(Path(raw["output"])).values())


def _trained(raw: dict[str, Any]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(TrainingInterrupted):
        run_training(RunConfig.parse(raw), RankInfo(rank, size, rank))


def same_bits(one: Path, other: Path) -> bool:
    """Whether the newest checkpoints of two runs hold the same."""
    first, second = (
        Checkpoint.open_folder(found) for output in (one, other) if (found := latest_checkpoint(output / "checkpoints"))
    )
    keys = list(first.tensor_keys())
    return keys == list(second.tensor_keys()) and all(
        torch.equal(first.read_tensor(key), second.read_tensor(key)) for key in keys
    )


def ended(launchers: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Their exit statuses."""
    return [launcher.wait(400) for launcher in launchers]
