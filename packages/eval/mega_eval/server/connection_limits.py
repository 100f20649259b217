"""Limits of open connections: their number, the time for a request's headers, and the time for a client to read an
answer.

uvicorn limits idle keep-alive connections and the size of headers; this module adds the other limits to its protocol. Every
waiting connection holds a file descriptor. At the maximum, the connection that has waited longest is closed for a new one,
so a client that sends its request at once is always served.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from mega_common.progress_logging import logger

FILES = 65536  # file descriptors to request from the system
RESERVE = 64  # file descriptors for everything but connections
ACCEPT = 32  # connections that the event loop accepts at a time
QUEUE = 2048  # connections that the kernel may complete before they are accepted
LOG_EVERY = 60.0  # seconds between log lines about the same failure of the event loop


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of the server's HTTP connections: waiting times of one connection, and the number of all.

    Attributes:
        head: seconds until the headers of a request are complete.
        flush: seconds until a client has read the rest of a finished answer.
        count: maximum number of open connections.
    """

    head: float = 10
    flush: float = 60
    count: int = 1024


class LimitedHttpProtocol(H11Protocol):
    """Server side of one HTTP/1.1 connection, which is closed if it waits too long for its client or too many are open."""

    bounds = ConnectionLimits()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._since = self.loop.time()
        self._closing = self._closed = False

    @property
    def is_waiting(self) -> bool:
        """True while the connection waits for its client to send a request or to read the end of an answer."""
        return not self._closed and (
            self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self.transport.is_closing()
        )

    @property
    def client_address(self) -> str:
        """IP address of the connection's client; empty if unknown."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a new connection, and close one if there are too many.
        The closed connection is another one that waits for its client, or else this one.
        """
        super().connection_made(transport)
        open_ones = [one for one in self.connections if isinstance(one, LimitedHttpProtocol) and not one._closed]
        if len(open_ones) > self.bounds.count:
            select_connection_to_close(open_ones).close_connection()

    def on_response_complete(self) -> None:
        """Start the time limit of waiting for the client after an answer; uvicorn calls it."""
        self._since = self.loop.time()
        super().on_response_complete()

    def shutdown(self) -> None:
        """Close the connection after the current answer, or at once if the request is incomplete; uvicorn calls it."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self.close_connection()
        else:
            super().shutdown()

    def close_connection(self) -> None:
        """Close the connection at once, without sending the rest of the answer."""
        self._closed = True
        self.transport.abort()

    def close_if_timed_out(self, now: float) -> None:
        """Close the connection if at time `now` it has waited longer for its client than the limits allow."""
        if self.transport.is_closing() and not self._closing:
            self._since, self._closing = now, True
        if self._closed or not (self._closing or self.cycle is None or self.cycle.response_complete):
            return  # `RequestCheckMiddleware` bounds the time for a body and for an answer
        flushes = self.transport.get_write_buffer_size() > 0
        if now - self._since > (self.bounds.flush if flushes else self.bounds.head):
            self.close_connection()


def select_connection_to_close(connections: Iterable[LimitedHttpProtocol]) -> LimitedHttpProtocol:
    """Return the oldest waiting connection of the client with the most of them; without any, the newest connection."""
    ordered = sorted(connections, key=lambda one: one._since)
    counts = Counter(one.client_address for one in ordered if one.is_waiting)
    if not counts:
        return ordered[-1]
    ((most, _),) = counts.most_common(1)
    return next(one for one in ordered if one.is_waiting and one.client_address == most)


def make_http_protocol_class(bounds: ConnectionLimits) -> type[LimitedHttpProtocol]:
    """Return a subclass of `LimitedHttpProtocol` with given connection limits, for uvicorn's `http` option."""
    return type("BoundedProtocol", (LimitedHttpProtocol,), {"bounds": bounds})


def count_available_connections(requested: int) -> int:
    """Raise the process's limit of open files, and return how many connections it allows, at most `requested`.
    The soft limit is raised as far as the system allows.

    The soft limit of file descriptors is raised first, as far as the system allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    else:
        limit = FILES if soft == resource.RLIM_INFINITY else soft
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else RESERVE
    available = limit - used - RESERVE - 3 * ACCEPT  # minus connections that are accepted while others close
    if available < requested:
        message = "the limit of %d open files (ulimit -n) allows only %d connections at once"
        logger.warning(message, limit, max(available, 1))
    return max(1, min(requested, available))


class EventLoopErrorLogger:
    """Exception handler for an asyncio event loop that logs each kind of failure at most once in `LOG_EVERY` seconds."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log the failure that `context` describes, unless one with the same message was logged recently."""
        message, now = str(context.get("message")), loop.time()
        if now - self._logged.get(message, -LOG_EVERY) >= LOG_EVERY:
            self._logged[message] = now
            logger.error("%s", message, exc_info=context.get("exception"))
