"""Time of honest requests to `mega serve` while other clients do all they can to hold it up.

    python benchmarks/hostile.py MODEL [--seconds 8] [--rounds 6] [--dry]

MODEL is a folder or run with a tokenizer. Two honest clients repeat the same greedy requests, alone and beside the hostile
ones of `ATTACKS`, which run in a process of their own, one thread each. Both are measured in turn for several rounds, since
other work on the machine changes with time. Reported are the medians over the rounds of the median, the 90th percentile and
the maximum of the honest times, and how many of the answers differ from the first (none may). The hostile requests share
the processor with the server: on a machine with two cores that alone costs time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from statistics import median, quantiles
from typing import Any

import record

JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
HONEST: list[dict[str, Any]] = [
    {"prompt": "def main", "max_tokens": 24},
    {"prompt": "the end of the story", "max_tokens": 16, "repetition_penalty": 1.2},
    {"prompt": "a list:", "max_tokens": 20, "grammar": '{"type": "array", "items": {"enum": [1, 2]}, "maxItems": 5}'},
]
NUMBERS: list[tuple[str, str]] = [
    (name, value)
    for name in ("repetition_penalty", "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    for value in ("1e-40", "5e-324", "0", "1e300", "NaN", "-1")
]


def post(port: int, body: bytes, timeout: float = 120) -> tuple[int, bytes]:
    """Return the status and body of a completion; status 0: no answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, JSON)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        return 0, repr(error).encode()


def _hold(port: int, count: int, data: bytes, seconds: float, drip: bytes = b"") -> None:
    """Open `count` connections, send `data`, and keep them open, with a `drip` each second."""
    held = []
    with contextlib.suppress(OSError):
        held = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(count)]
    end = time.monotonic() + seconds
    while True:
        for one in held:
            with contextlib.suppress(OSError):
                one.sendall(data)
        data = drip
        if time.monotonic() > end:
            break
        time.sleep(1)
    for one in held:
        one.close()


def numbers(port: int, draw: random.Random) -> None:
    """Send sampling settings at the end of what a number can be."""
    name, value = draw.choice(NUMBERS)
    post(port, f'{{"prompt": "def main", "max_tokens": 4, "{name}": {value}, "seed": {draw.randrange(99)}}}'.encode())


def grammars(port: int, draw: random.Random) -> None:
    """Send a grammar that takes minutes to compile, another one each time."""
    parts = " & ".join(f"/(.|\\\\n)*[ab].{{{draw.randrange(10, 99)}}}/" for _ in range(20))
    post(port, f'{{"prompt": "a", "max_tokens": 5, "grammar": "start: A\\nA: {parts}"}}'.encode())


def endless_headers(port: int, draw: random.Random) -> None:
    """Hold connections by headers that do not end."""
    _hold(port, 300, HEAD + b"X-A: ", 5, b"a")


def slow_bodies(port: int, draw: random.Random) -> None:
    """Hold connections by bodies that do not end."""
    _hold(port, 100, HEAD + b"Content-Length: 99999\r\n\r\n{", 5, b" ")


def slow_readers(port: int, draw: random.Random) -> None:
    """Ask for streams and do not read them."""
    body = b'{"prompt": "a", "max_tokens": 8, "stream": true, "logprobs": 5}'
    _hold(port, 4, HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body, 3)


def long_prompts(port: int, draw: random.Random) -> None:
    """Send a prompt of nearly a megabyte."""
    post(port, json.dumps({"prompt": draw.choice(["a", "a ", "\n"]) * 450_000, "max_tokens": 2}).encode())


def garbage(port: int, draw: random.Random) -> None:
    """Send bytes that are no request, and JSON that is nested without end."""
    _hold(port, 3, draw.randbytes(3000), 0)
    post(port, b"[" * 100_000)


ATTACKS: list[Callable[[int, random.Random], None]] = [
    numbers, grammars, endless_headers, slow_bodies, slow_readers, long_prompts, garbage,
]  # fmt: skip


def attack(port: int) -> None:
    """Run all attacks, each again and again in a thread of its own."""

    def repeat(one: Callable[[int, random.Random], None]) -> None:
        draw = random.Random(one.__name__)
        while True:
            one(port, draw)
            time.sleep(0.3)

    threads = [threading.Thread(target=repeat, args=[one]) for one in ATTACKS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def honest(port: int, seconds: float) -> dict[str, Any]:
    """Repeat the honest requests for some time in two threads; returns statuses, texts and times."""
    found: dict[str, Any] = {"statuses": [], "texts": {number: set() for number in range(len(HONEST))}, "times": []}
    end = time.monotonic() + seconds

    def client() -> None:
        while time.monotonic() < end:
            for number, body in enumerate(HONEST):
                begun = time.monotonic()
                status, answer = post(port, json.dumps({"temperature": 0, **body}).encode())
                found["times"].append(time.monotonic() - begun)
                found["statuses"].append(status)
                found["texts"][number].add(json.loads(answer)["choices"][0]["text"] if status == 200 else answer)
                time.sleep(0.05)

    threads = [threading.Thread(target=client) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@contextlib.contextmanager
def attacked(port: int) -> Iterator[None]:
    """Run the attacks in another process meanwhile."""
    process = multiprocessing.get_context("spawn").Process(target=attack, args=[port])
    process.start()
    try:
        time.sleep(2)
        yield
    finally:
        process.kill()
        process.join()


def compare(port: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Return the times of honest requests alone and among hostile ones, and the number of changed answers."""
    first = honest(port, 3)
    alone, among = list[dict[str, Any]](), list[dict[str, Any]]()
    for _ in range(rounds):
        alone.append(honest(port, seconds))
        with attacked(port):
            among.append(honest(port, seconds))
    both = alone + among
    return {
        "rounds": rounds,
        "requests": [sum(len(one["times"]) for one in side) for side in (alone, among)],
        "failed": sum(status != 200 for one in both for status in one["statuses"]),
        "changed": sum(
            any(one["texts"][number] != first["texts"][number] for one in both) for number in range(len(HONEST))
        ),
        "median": [_middle(median, side) for side in (alone, among)],
        "p90": [_middle(lambda times: quantiles(times, n=10)[-1], side) for side in (alone, among)],
        "max": [_middle(max, side) for side in (alone, among)],
    }


def _middle(measure: Callable[[list[float]], float], rounds: list[dict[str, Any]]) -> float:
    """Return the median over rounds of a measure of their times."""
    return median(measure(one["times"]) for one in rounds)


@contextlib.contextmanager
def served(model: str, *options: str) -> Iterator[tuple[int, int]]:
    """Serve a model on a free port meanwhile; yields the port and the id of the server's process."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-m", "mega_cli.main", "serve", model, "--port", str(port), *options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None and post(port, b'{"prompt": "a", "max_tokens": 1}')[0] != 200:
            time.sleep(0.5)
        yield port, server.pid
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    """Run the comparison; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=8, help="of a round of each kind")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    with served(options.model) as (port, _):
        found = compare(port, options.seconds, options.rounds)
    print(json.dumps(found, indent=1))
    if not options.dry:
        record.write("hostile", found, ["uvicorn", "llguidance"])


if __name__ == "__main__":
    main()
