"""Several replicas of a server behind HAProxy: configuration, shares of a machine, and a run with a killed replica."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import typer
from commands import typed
from served_models import text_model
from serving import until

from mega_cli import serve_replicas
from mega_cli.serve import serve_command
from mega_cli.serve_replicas import assign_devices_to_replicas, find_haproxy, format_haproxy_config
from mega_common.errors import ConfigError, MegaError, MissingPackageError

PROXY = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
needs_proxy = pytest.mark.skipif(PROXY is None, reason="requires haproxy")


@needs_proxy
def test_the_proxy_accepts_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    with socket.create_server(("127.0.0.1", 0)) as one:
        file.write_text(format_haproxy_config([4001, 4002, 4003], one.fileno(), 600))
        command = [str(PROXY), "-c", "-f", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, pass_fds=[one.fileno()])
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    assert "server replica-2 127.0.0.1:4003 check" in file.read_text()


@pytest.mark.parametrize(
    ("replicas", "ranks", "devices", "expected"),
    [
        (2, 1, ["0", "1", "2"], ["0", "1"]),
        (2, 2, ["4", "5", "6", "7"], ["4,5", "6,7"]),
    ],
)
def test_each_replica_has_gpus_of_its_own(replicas: int, ranks: int, devices: list[str], expected: list[str]) -> None:
    assert [one["CUDA_VISIBLE_DEVICES"] for one in assign_devices_to_replicas(replicas, ranks, devices)] == expected


def test_too_few_gpus_are_named() -> None:
    with pytest.raises(ConfigError, match=r"requires 4 GPUs \(2 each\), and 3 are visible") as mistake:
        assign_devices_to_replicas(2, 2, ["0", "1", "2"])
    assert mistake.value.hint == "use --replicas 1, or --device cpu"


def test_replicas_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert assign_devices_to_replicas(3, 1, []) == [{"OMP_NUM_THREADS": "2"}] * 3


@pytest.mark.parametrize(
    ("options", "message", "kind"),
    [
        (["--adapter-folder", "."], "--adapter-folder is not supported with --replicas", ConfigError),
        (["--device", "cuda:1"], "--device cuda:1 is not supported with --replicas", ConfigError),
        (["--host", "0.0.0.0"], "requires an API key", ConfigError),
        ([], "requires HAProxy, which is not installed", MissingPackageError),
    ],
)
def test_replicas_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, options: list[str], message: str, kind: type[MegaError]
) -> None:
    monkeypatch.setattr(serve_replicas, "find_haproxy", (lambda: "haproxy") if options else find_haproxy)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    app = typer.Typer()
    app.command("serve")(serve_command)
    assert message in str(typed(app, "model", "--replicas", 2, *options, fails=kind).exception)


@needs_proxy
@pytest.mark.long
def test_requests_are_shared_and_a_killed_replica_comes_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = text_model(tmp_path_factory)
    command = [sys.executable, "-m", "mega_cli.main", "serve", str(folder), "--port", "0", "--replicas", "2"]
    with (
        subprocess.Popen([*command, "--name", "tiny"], stderr=subprocess.PIPE, text=True) as server,
        contextlib.ExitStack() as failed,
    ):
        failed.callback(server.kill)
        assert server.stderr is not None
        processes, log = dict[str, int](), iter(server.stderr)
        line = ""
        while "serving 2 replicas at" not in line:
            line = next(log)
            if found := re.search(r"replica (\d) is ready on port \d+ \(process (\d+)\)", line):
                processes[found[1]] = int(found[2])
        url = re.search(r"http://\S+", line)[0]  # type: ignore[index]

        def ask(**more: Any) -> httpx.Response:
            body = {"prompt": "the story", "max_tokens": 4, "temperature": 0}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=60, **more)

        def count_answers() -> list[int]:
            texts = [httpx.get(f"{url}/metrics/{number}").text for number in range(2)]
            pattern = r'mega_requests_total\{route="/v1/completions",status="200"\} (\d+)'
            return [sum(int(count) for count in re.findall(pattern, text)) for text in texts]

        # the proxy checks the replicas by itself, up to a second later
        until(lambda: all(httpx.get(f"{url}/metrics/{number}").status_code == 200 for number in range(2)))
        assert {ask().json()["choices"][0]["text"] for _ in range(6)} == {ask().json()["choices"][0]["text"]}
        before = count_answers()
        assert min(before) > 0
        assert {ask(headers={"x-session-id": "mine"}).status_code for _ in range(6)} == {200}
        assert sorted(after - old for after, old in zip(count_answers(), before, strict=True)) == [0, 6]
        assert (httpx.get(f"{url}/metrics").status_code, "/metrics/0" in httpx.get(f"{url}/metrics").text) == (
            404,
            True,
        )
        os.kill(processes["0"], signal.SIGKILL)
        assert {ask().status_code for _ in range(6)} == {200}
        assert "replica 0 has ended with status -9 and is restarted" in next(one for one in log if "has ended" in one)
        again = next(one for one in log if "replica 0 is ready" in one)
        until(lambda: httpx.get(f"{url}/metrics/0").status_code == 200)
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
        failed.pop_all()
    assert server.returncode == 0
    last = int(re.search(r"process (\d+)", again)[1])  # type: ignore[index]
    assert not any(Path(f"/proc/{process}").exists() for process in (last, processes["1"]))
    with pytest.raises(httpx.ConnectError):
        ask()
