"""Clients that hold a connection: each is closed in time, and no other client waits for it."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from serving import Scripted, service_of, serving, until

from mega_data.tokenizer import train_tokenizer
from mega_eval.server import connection_limits
from mega_eval.server.connection_limits import (
    ConnectionLimits,
    EventLoopErrorLogger,
    count_available_connections,
    select_connection_to_close,
)

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
FULL = json.dumps({"prompt": "some", "max_tokens": 3}).encode()
KEY = b"Authorization: Bearer a-long-key\r\n"
QUICK = {
    "connections": ConnectionLimits(head=0.3, flush=0.3, count=40), "body_seconds": 0.3, "stalled_seconds": 0.3,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some text"], 260, folder)
    return folder


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(url: str, sockets: ExitStack, data: bytes = b"") -> socket.socket:
    found = sockets.enter_context(socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))))
    found.sendall(data)
    return found


def post(url: str, **body: Any) -> httpx.Response:
    headers = {"authorization": "Bearer a-long-key"}
    return httpx.post(f"{url}/v1/completions", json={"prompt": "some", "max_tokens": 3, **body}, headers=headers)


def served(url: str, **body: Any) -> bool:
    """Whether an honest request is answered; on a busy machine it may itself be too late for short deadlines."""
    try:
        return post(url, **body).status_code == 200
    except httpx.HTTPError:
        return False


def read_to_end(one: socket.socket, drip: bytes = b"") -> bytes:
    """Return all that the server sends until it closes; meanwhile send `drip` again and again."""
    one.settimeout(0.05)
    found, end = b"", time.monotonic() + 20
    while time.monotonic() < end:
        try:
            data = one.recv(65536)
            found += data
            if not data:
                return found
        except TimeoutError:
            pass
        except OSError:  # reset
            return found
        try:
            one.sendall(drip)
        except OSError:
            return found
    raise AssertionError("the server did not close the connection")


HOLDERS = {
    "nothing": (b"", b""),
    "half a request line": (b"POST /v1/comp", b""),
    "headers that end nowhere": (HEAD, b""),
    "headers that grow": (HEAD, b"X-A: b\r\n"),
    "a header of single bytes": (HEAD + b"X-A: ", b"b"),
    "headers with a key": (HEAD + KEY, b""),
    "empty lines": (b"", b"\r\n"),
    "no body": (HEAD + KEY + b"Content-Length: 100\r\n\r\n", b""),
    "half a body": (HEAD + KEY + b"Content-Length: 100\r\n\r\n{", b""),
    "a body of single bytes": (HEAD + KEY + b"Content-Length: 9999\r\n\r\n{", b" "),
    "a chunked body without end": (HEAD + KEY + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "a body that waits for leave": (HEAD + KEY + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n", b""),
    "no key and no body": (HEAD + b"Content-Length: 100\r\n\r\n", b""),
    "no key and a body of single bytes": (HEAD + b"Content-Length: 9999\r\n\r\n", b" "),
    "a body that nobody reads": (HEALTH + b"Content-Length: 9999\r\n\r\n", b" "),
    "keep-alive": (HEALTH + b"\r\n", b""),
    "keep-alive and half a request": (HEALTH + b"\r\n" + HEALTH, b""),
    "keep-alive and single bytes": (HEALTH + b"\r\n" + HEALTH + b"X-A: ", b"b"),
    "an upgrade": (HEALTH + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n", b""),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_clients_that_send_no_request_are_closed_in_time(name: str, tokenizer: Path, sockets: ExitStack) -> None:
    """`until` and `read_to_end` fail when their condition does not come true."""
    engine, (first, drip) = Scripted(), HOLDERS[name]
    engine.go.set()
    with serving(service_of(engine, tokenizer), key="a-long-key", **QUICK) as (url, server):
        holders = [connect(url, sockets, first) for _ in range(3)]
        until(lambda: served(url))
        for holder in holders:
            read_to_end(holder, drip)
        until(lambda: not server.server_state.connections)


def test_slow_bodies_take_no_place_and_end_with_408(tokenizer: Path, sockets: ExitStack) -> None:
    engine = Scripted()
    engine.go.set()
    with serving(service_of(engine, tokenizer), requests=2, body_seconds=5.0) as (url, server):
        head = HEAD + f"Content-Length: {len(FULL)}\r\nConnection: close\r\n\r\n".encode()
        slow = [connect(url, sockets, head + FULL[:5]) for _ in range(8)]
        until(lambda: len(server.server_state.connections) == 8)
        assert [post(url).status_code for _ in range(4)] == [200] * 4
        slow[0].sendall(FULL[5:])
        assert read_to_end(slow[0]).startswith(b"HTTP/1.1 200")
        assert read_to_end(slow[1]).startswith(b"HTTP/1.1 408")
        assert server.gate.active == 0


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_take_no_answer_are_closed_and_hold_no_place(
    stream: bool, tokenizer: Path, sockets: ExitStack
) -> None:
    engine = Scripted(text="x" * 30_000)
    engine.go.set()
    with serving(service := service_of(engine, tokenizer), **QUICK) as (url, server):
        body = json.dumps({"prompt": "some", "max_tokens": 200, "stream": stream}).encode()
        request = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        for _ in range(3):
            connect(url, sockets, request)
        until(lambda: list(engine.said.values()) == [200] * 3)
        until(lambda: service.driver.open_requests == 0 and server.gate.active == 0)
        until(lambda: not server.server_state.connections)
        until(lambda: served(url, max_tokens=1))
        assert list(engine.said.values())[:3] == [200] * 3  # the three answers were generated to their ends


@pytest.mark.parametrize("first", [b"", HEAD, HEAD + b"Content-Length: 100\r\n\r\n"], ids=["idle", "head", "body"])
def test_more_connections_than_the_server_takes_keep_nobody_out(
    first: bytes, tokenizer: Path, sockets: ExitStack
) -> None:
    engine = Scripted()
    engine.go.set()
    with serving(service_of(engine, tokenizer), requests=2, connections=ConnectionLimits(count=6)) as (url, server):
        for _ in range(60):
            connect(url, sockets, first)
        assert [post(url).status_code for _ in range(3)] == [200] * 3
        until(lambda: len(server.server_state.connections) <= 8)


def connection(address: str, since: float, *, waits: bool = True) -> Any:
    return SimpleNamespace(client_address=address, _since=since, is_waiting=waits)


@pytest.mark.parametrize(
    ("given", "closed"),
    [
        ([("a", 1, True)], 0),
        ([("a", 2, True), ("a", 1, True)], 1),
        ([("a", 1, False), ("a", 2, True), ("a", 3, True)], 1),
        ([("a", 1, True), ("b", 2, True), ("b", 3, True)], 1),
        ([("b", 3, True), ("a", 1, True), ("b", 2, True)], 2),
        ([("a", 1, True), ("b", 2, False), ("b", 3, False)], 0),
        ([("a", 1, False), ("b", 2, False), ("b", 3, True)], 2),
        ([("a", 1, False), ("a", 3, False), ("a", 2, False)], 1),
        ([("a", 5, True), ("b", 4, True)], 1),
        ([("", 5, True), ("", 4, True), ("b", 1, True)], 1),
    ],
)
def test_the_connection_that_makes_room(given: list[tuple[str, float, bool]], closed: int) -> None:
    found = [connection(address, since, waits=waits) for address, since, waits in given]
    assert select_connection_to_close(found) is found[closed]


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "room"),
    [
        (256, 256, None, 1),
        (256, 4096, 4096, 100),
        (1024, 10**9, 65536, 100),
        (1024, resource.RLIM_INFINITY, 65536, 100),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 100),
        (10**6, 10**6, None, 100),
        (64, 64, None, 1),
    ],
)
def test_connections_fit_the_file_descriptors(
    soft: int, hard: int, limit: int | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[int] = []
    monkeypatch.setattr(connection_limits.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(connection_limits.resource, "setrlimit", lambda _, pair: said.append(pair[0]))
    found = count_available_connections(100)
    assert said == ([] if limit is None else [limit])
    assert room <= found <= 100


def test_a_failure_of_the_event_loop_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    loop, handler = asyncio.new_event_loop(), EventLoopErrorLogger()
    with caplog.at_level(logging.ERROR):
        for number in range(1000):
            handler(loop, {"message": "out of system resource", "exception": OSError(24, f"number {number}")})
        handler(loop, {"message": "something else"})
    loop.close()
    assert [record.getMessage() for record in caplog.records] == ["out of system resource", "something else"]
