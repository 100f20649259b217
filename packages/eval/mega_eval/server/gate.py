"""What every request passes first: who may come in, how many at once, and for how long.

It stands around the whole application, so that a body is not even read of a request that is refused.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mega_common.log import logger
from mega_eval.server.errors import Refusal, refusal_of
from mega_eval.server.metrics import Metrics

PUBLIC = ("/", "/health")  # the page holds no secret: what it asks for goes by the key
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
GRACE = 5.0  # seconds in which an answer that ran out of time can still say so


@dataclass(frozen=True)
class Bounds:
    """What the server takes.

    Attributes:
        key: that clients have to bring; None: none.
        hosts: names that it may be called by; None: any. Without a key this keeps out web pages, whose own host name
            can be made to lead here ("DNS rebinding").
        requests: of any kind, at the same time.
        seconds: for one request, from its first byte to the last of the answer.
        body: bytes of a request.
    """

    key: str | None
    hosts: Sequence[str] | None
    requests: int
    seconds: float
    body: int


class Gate:
    """An ASGI application around another.

    Attributes:
        active: requests inside.
        draining: whether new ones are refused, since the server ends.
    """

    def __init__(self, app: ASGIApp, bounds: Bounds, metrics: Metrics) -> None:
        self._app, self._bounds, self._metrics = app, bounds, metrics
        self.active = 0
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, Headers(scope=scope))
        begun = time.monotonic()
        try:
            self._check(scope)
            self.active += 1
            try:
                async with asyncio.timeout(self._bounds.seconds + GRACE):
                    await self._app(scope, _at_most(self._bounds.body, receive), answer.send)
            finally:
                self.active -= 1
        except Exception as error:  # noqa: BLE001 - the last place where a request can be answered
            if isinstance(error, TimeoutError):
                error = Refusal(504, f"not done within {self._bounds.seconds:.0f} seconds")
            elif not isinstance(error, Refusal):
                logger.exception("request %s failed", answer.id)
            if answer.status == 0:
                await refusal_of(error).response()(scope, receive, answer.send)
        finally:
            self._metrics.request(scope, answer.status, time.monotonic() - begun)

    def _check(self, scope: Scope) -> None:
        path, headers, bounds = scope["path"], Headers(scope=scope), self._bounds
        if bounds.hosts is not None and _host(headers) not in bounds.hosts:
            raise Refusal(403, "this server is for its own machine only: call it by 127.0.0.1 or localhost")
        if path in PUBLIC:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")  # RFC 9110: a scheme has any case
        if bounds.key is not None and not (scheme.lower() == "bearer" and _same(given.strip(), bounds.key)):
            raise Refusal(401, "a valid API key is wanted: 'Authorization: Bearer KEY'")
        if scope["method"] != "POST":
            return
        if not headers.get("content-type", "").partition(";")[0].strip().lower().endswith("json"):
            raise Refusal(415, "the body has to be JSON: 'Content-Type: application/json'")
        if self.draining:
            raise Refusal(503, "the server is shutting down", retry_after=10)
        if self.active >= bounds.requests:
            raise Refusal(429, f"the server is busy with {self.active} requests", retry_after=1)


def _at_most(size: int, receive: Receive) -> Receive:
    """Takes no more than `size` bytes of a body, whatever its header says."""
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > size:
            # of all errors it is this one that FastAPI lets through while it reads a body
            raise HTTPException(413, f"the body has more than {size} bytes")
        return message

    return bounded


def _host(headers: Headers) -> str:
    """The name that the server was called by, without the port."""
    return re.sub(r":\d+$", "", headers.get("host", "")).strip("[]").lower()


def _same(given: str, wanted: str) -> bool:
    """In a time that does not tell how much of it was right."""
    return hmac.compare_digest(given.encode(), wanted.encode())


class _Answer:
    """Sends an answer on with the request's id, and remembers the status (0: nothing was sent)."""

    def __init__(self, send: Send, headers: Headers) -> None:
        given = headers.get("x-request-id", "")
        self.id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.status = 0
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.id
            headers["x-content-type-options"] = "nosniff"
        await self._send(message)
