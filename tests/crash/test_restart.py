"""The command of the Kubernetes manifest on this machine: a rank of one agent is killed, and all go on together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mega_cli.launch import app

pytestmark = pytest.mark.long

RUN = "{model: {preset: tiny}, data: {train: tokens}, parallel: {tp: 2}}"
RANK = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist

rank = os.environ["RANK"]
with open("attempts", "a") as log:
    log.write(f"{rank}\\n")
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
killed = rank == "1" and not os.path.exists("killed")
dist.all_reduce(torch.ones(1))
if killed:
    open("killed", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def test_machines_go_on_together_when_a_rank_of_one_is_killed(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "rank.py").write_text(RANK)
    options = ["kubernetes", str(tmp_path / "run.yaml"), "--nodes", "2", "--gpus-per-node", "1"]
    objects = list(yaml.safe_load_all(CliRunner().invoke(app, options, catch_exceptions=False).stdout))
    container = objects[2]["spec"]["template"]["spec"]["containers"][0]
    shell, flag, command = container["command"]
    for there, here in (
        ("python3", sys.executable),
        ("run-0.run:29500", f"localhost:{free_port()}"),
        ("-m mega_cli.main train /config/run.yaml", "rank.py"),
    ):
        assert there in command
        command = command.replace(there, here)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    env |= {item["name"]: item["value"] for item in container["env"]}
    agents = [
        subprocess.Popen([shell, flag, command], cwd=tmp_path, env={**env, "JOB_COMPLETION_INDEX": str(index)})
        for index in range(2)
    ]
    try:
        assert [agent.wait(120) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    assert sorted((tmp_path / "attempts").read_text().split()) == ["0", "0", "1", "1"]
