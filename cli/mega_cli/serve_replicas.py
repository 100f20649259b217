"""Several copies of a server behind one address (`mega serve --replicas`), with HAProxy as the load balancer.

Every replica is a server process of its own on a loopback port. HAProxy (https://www.haproxy.org) checks their health,
sends each request to the replica with the fewest, and passes streams on without buffering.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from mega_common.errors import ConfigError, MissingPackageError, TrainingError
from mega_common.parent_death import terminate_with_parent
from mega_common.progress_logging import logger

POLL_SECONDS = 0.2
HEALTH_SECONDS = 5.0  # between checks of a replica that is ready
RESTARTS = 3  # of a replica in a row without becoming healthy
SESSION_HEADER = (
    "x-session-id"  # requests with equal values go to the same replica, which has their prefix in its KV cache
)

CONFIGURATION = """\
global
    maxconn 4096
    no strict-limits

defaults
    mode http
    option http-no-delay
    option redispatch
    retries 3
    timeout connect 5s
    timeout client {seconds}s
    timeout server {seconds}s
    timeout http-request 10s
    timeout http-keep-alive 10s
    http-error status 502 content-type application/json string '{lost}'
    http-error status 503 content-type application/json string '{unavailable}'
    http-error status 504 content-type application/json string '{late}'

frontend address
    bind fd@{descriptor}
    http-request return status 404 content-type application/json string '{metrics}' if {{ path /metrics }}
{metrics_rules}
    use_backend sessions if {{ req.hdr({header}) -m found }}
    default_backend replicas

backend replicas
    balance leastconn
    option httpchk
    http-check send meth GET uri /health ver HTTP/1.1 hdr host localhost
    http-check expect status 200
{servers}

backend sessions
    balance hdr({header})
    hash-type consistent
{tracked}
"""
METRICS_BACKEND = """
backend metrics-{number}
    http-request set-path /metrics
    server replica-{number} 127.0.0.1:{port} track replicas/replica-{number}
"""
ERROR = '{{"error": {{"message": "{message}", "type": "server_error", "param": null, "code": "unavailable"}}}}'


def format_haproxy_config(ports: Sequence[int], descriptor: int, seconds: float) -> str:
    """Return the configuration of HAProxy for replicas on loopback ports.

    Args:
        ports: port of each replica.
        descriptor: number of the file descriptor of the socket to listen on, which HAProxy inherits.
        seconds: time limit of an answer.
    """
    numbers = range(len(ports))
    servers = [
        f"    server replica-{number} 127.0.0.1:{port} check inter 1s fastinter 250ms fall 2 rise 1"
        for number, port in enumerate(ports)
    ]
    tracked = [
        f"    server replica-{number} 127.0.0.1:{port} track replicas/replica-{number}"
        for number, port in enumerate(ports)
    ]
    rules = [f"    use_backend metrics-{number} if {{ path /metrics/{number} }}" for number in numbers]
    metrics = ERROR.format(message=f"each replica has its own metrics: /metrics/0 to /metrics/{len(ports) - 1}")
    text = CONFIGURATION.format(
        seconds=int(seconds) + 10, descriptor=descriptor, header=SESSION_HEADER, servers="\n".join(servers),
        tracked="\n".join(tracked), metrics_rules="\n".join(rules), metrics=metrics,
        lost=ERROR.format(message="the replica was lost; send the request again"),
        unavailable=ERROR.format(message="no replica is ready"), late=ERROR.format(message="the replica was too slow"),
    )  # fmt: skip
    return text + "".join(METRICS_BACKEND.format(number=number, port=port) for number, port in enumerate(ports))


def find_haproxy() -> str:
    """Return the path of the installed HAProxy; a MissingPackageError if there is none.

    Raises:
        MissingPackageError: when it is not installed.
    """
    found = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None:
        raise MissingPackageError(
            "--replicas requires HAProxy, which is not installed", hint="apt-get install haproxy, version 2.4 or later"
        )
    return found


def assign_devices_to_replicas(replicas: int, ranks: int, devices: Sequence[str]) -> list[dict[str, str]]:
    """Return, for each replica, the environment variables that give it its own GPUs, or threads of a CPU.
    Each gets `ranks` of the visible GPUs `devices`, as in CUDA_VISIBLE_DEVICES, or without GPUs OMP_NUM_THREADS.

    Raises:
        ConfigError: when there are too few GPUs.
    """
    if not devices:
        threads = max(1, len(os.sched_getaffinity(0)) // replicas)
        return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))} for _ in range(replicas)]
    if replicas * ranks > len(devices):
        raise ConfigError(
            f"--replicas {replicas} requires {replicas * ranks} GPUs ({ranks} each), and {len(devices)} are visible",
            hint=f"use --replicas {max(1, len(devices) // ranks)}, or --device cpu",
        )
    shares = [devices[number * ranks : (number + 1) * ranks] for number in range(replicas)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def list_visible_devices(device: str) -> list[str]:
    """Return the GPUs that replicas may use, as in CUDA_VISIBLE_DEVICES; none on a CPU.

    Raises:
        ConfigError: when `device` is a single GPU.
    """
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device} is not supported with --replicas", hint="use --device cuda")
    if device == "cpu" or not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def choose_free_ports(count: int) -> list[int]:
    """Return `count` different loopback TCP ports that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@dataclass
class ServerReplica:
    """Server process on a loopback port, which is restarted when it ends.

    Attributes:
        number: index of the replica.
        port: its port.
        environment: its environment variables.
        ready: True once it has answered since its last start.
        healthy: True if it answered the last check.
        failures: ends in a row without having been ready.
    """

    number: int
    port: int
    environment: Mapping[str, str]
    ready: bool = False
    healthy: bool = False
    failures: int = 0
    process: subprocess.Popen[bytes] = field(init=False)
    _checked: float = 0.0

    def start_process(self) -> None:
        """Start the command of this process once more, as a server on the replica's port."""
        command = [sys.executable, "-m", "mega_cli.main", *sys.argv[1:]]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--replicas", "1"]  # the last value counts
        self.ready = self.healthy = False
        self.process = _start_child(command, {**os.environ, **self.environment})

    def restart_process(self, status: int) -> None:
        """Start the replica's process again after exit status `status`; a TrainingError if it repeatedly fails to start.

        Raises:
            TrainingError: when the replica has ended too often without becoming ready.
        """
        self.failures = 0 if self.ready else self.failures + 1
        if self.failures == RESTARTS:
            raise TrainingError(f"replica {self.number} does not start again (exit status {status})")
        logger.warning("replica %d has ended with status %d and is restarted", self.number, status)
        self.start_process()

    def check_health(self) -> None:
        """Ask the replica for its health, update `healthy` and `ready`, and log when they change.
        A replica that is healthy is asked every 5 seconds at most.
        """
        if self.healthy and time.monotonic() < self._checked + HEALTH_SECONDS:
            return
        before, self.healthy, self._checked = self.healthy, self._answers(), time.monotonic()
        if self.healthy and not self.ready:
            logger.info("replica %d is ready on port %d (process %d)", self.number, self.port, self.process.pid)
        elif self.ready and self.healthy != before:
            logger.warning("replica %d %s", self.number, "answers again" if self.healthy else "does not answer")
        self.ready = self.ready or self.healthy

    def _answers(self) -> bool:
        """Return whether the replica answers requests."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/health", headers={"host": "localhost"})
            return connection.getresponse().status == 200
        return False


def _start_child(
    command: Sequence[str], environment: Mapping[str, str], files: Sequence[int] = (), errors: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, and does not get the signals of the terminal."""
    return subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        preexec_fn=terminate_with_parent,
        pass_fds=files,
        stderr=errors,
    )


@contextlib.contextmanager
def _count_stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT in a list instead of ending this process."""
    found: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: found.append(number)) for number in numbers}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_server_replicas(
    listener: socket.socket, environments: Sequence[Mapping[str, str]], seconds: float, drain: float
) -> int:
    """Run this command as several replicas behind HAProxy until SIGTERM or SIGINT; return the exit status.
    A replica that ends is restarted. The status is that of a replica that ends before it is healthy for the first
    time, else 0.

    Args:
        listener: bound socket of the address.
        environments: environment variables of each replica.
        seconds: time limit of an answer.
        drain: seconds in which replicas may finish their requests after the first signal; a second signal ends them.

    Raises:
        MissingPackageError: when HAProxy is not installed.
        TrainingError: when HAProxy ends, or a replica does not become healthy again.
    """
    proxy_path = find_haproxy()
    replicas = [
        ServerReplica(number, port, environment)
        for number, (port, environment) in enumerate(
            zip(choose_free_ports(len(environments)), environments, strict=True)
        )
    ]
    host, port, *_ = listener.getsockname()
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    with tempfile.TemporaryDirectory(prefix="mega-serve-") as folder, _count_stop_signals() as signals:
        file, log = Path(folder, "haproxy.cfg"), Path(folder, "haproxy.log")
        ports = [one.port for one in replicas]
        file.write_text(format_haproxy_config(ports, listener.fileno(), seconds), encoding="utf-8")
        with log.open("wb") as stream:
            proxy = _start_child([proxy_path, "-f", str(file), "-db"], os.environ, [listener.fileno()], stream)
        listener.close()  # so that nothing accepts connections after HAProxy
        try:
            for one in replicas:
                one.start_process()
            return _watch_replicas(replicas, proxy, log, address, signals)
        finally:
            _stop_all(replicas, proxy, signals, drain)


def _watch_replicas(
    replicas: Sequence[ServerReplica], proxy: subprocess.Popen[bytes], log: Path, address: str, signals: Sequence[int]
) -> int:
    """Restart replicas that end, until a signal; return the exit status of one that cannot start."""
    announced = False
    while not signals:
        if (status := proxy.poll()) is not None:
            lines = [] if announced else log.read_text(errors="replace").splitlines()
            alerts = "; ".join(line for line in lines if line.startswith("[ALERT]"))
            raise TrainingError(f"HAProxy has ended with status {status}", hint=alerts or "start the command again")
        for one in replicas:
            if (status := one.process.poll()) is None:
                one.check_health()
            elif announced or one.ready:
                one.restart_process(status)
            else:
                return status
        if not announced and all(one.ready for one in replicas):
            logger.info("serving %d replicas at %s (Ctrl-C ends)", len(replicas), address)
            announced = True
        time.sleep(POLL_SECONDS)
    return 0


def _stop_all(
    replicas: Sequence[ServerReplica], proxy: subprocess.Popen[bytes], signals: Sequence[int], drain: float
) -> None:
    """End HAProxy and the replicas: gently at first, and by force after `drain` seconds or at a second signal."""
    begun, count = time.monotonic(), len(signals)
    processes = [one.process for one in replicas if hasattr(one, "process")]
    if proxy.poll() is None:
        proxy.send_signal(signal.SIGUSR1)  # accepts no connections and ends with the last open one
    for process in processes:
        process.terminate()
    late = begun + drain + 10
    while any(process.poll() is None for process in processes):
        if len(signals) > count or time.monotonic() > late:
            for process in processes:
                process.kill()
        time.sleep(POLL_SECONDS)
    proxy.kill()
    proxy.wait()
