"""Gate around the application: access control, and limits of the number, size and time of requests.

The body of a refused request is not read. The body of any other request is read before the request counts as active, so a
client that sends its body slowly does not block others.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mega_common.progress_logging import logger
from mega_eval.server.api_errors import ApiRequestError, convert_to_api_error
from mega_eval.server.connection_limits import ConnectionLimits
from mega_eval.server.server_metrics import ServerMetrics

# files of the page by path: name in the folder `page` and media type
PAGE_FILES = {
    "/": ("index.html", "text/html"), "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"), "/page/markdown.js": ("markdown.js", "text/javascript"),
}  # fmt: skip
PUBLIC = (*PAGE_FILES, "/health")  # paths without API key; the page itself sends the key with its requests
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
GRACE = 5.0  # seconds for an answer that ran out of time to report the timeout


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the HTTP server: API key, allowed host names, numbers, sizes and times of requests.

    Attributes:
        key: API key that clients must send, or None.
        hosts: host names that clients may use; None: any. Without a key this protects against web pages whose host name
            resolves to this machine (DNS rebinding).
        requests: maximum number of active requests.
        seconds: time limit of one request, from its first byte to the end of the answer.
        body: maximum number of bytes of a request body.
        body_seconds: time limit until the body of a request is complete.
        stalled_seconds: time limit until a client reads the next part of its answer.
        connections: limits of connections.
        origins: origins of web pages that may call the server (CORS), such as https://chat.example; "*": any.
    """

    key: str | None
    hosts: Sequence[str] | None
    requests: int
    seconds: float
    body: int
    body_seconds: float = 30
    stalled_seconds: float = 30
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    origins: Sequence[str] = ()


class RequestCheckMiddleware:
    """ASGI middleware that checks the key, host, size and number of requests before it passes them to the application.

    Attributes:
        active: number of active requests.
        draining: True during shutdown, when new requests are refused.
    """

    def __init__(self, app: ASGIApp, bounds: ServerLimits, metrics: ServerMetrics) -> None:
        self._app, self._bounds, self._metrics = app, bounds, metrics
        self.active = 0
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request to the application, or answer it with an error if a limit of the server refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _TrackedSender(send, Headers(scope=scope), self._bounds.stalled_seconds)
        start = time.monotonic()
        try:
            self._check_access(scope)
            if scope["method"] == "POST":
                self._check_capacity()
                receive = await self._read_body(receive)
                self._check_capacity()
            self.active += 1
            try:
                async with asyncio.timeout(self._bounds.seconds + GRACE):
                    await self._app(scope, receive, answer.send_message)
            finally:
                self.active -= 1
        except Exception as error:  # noqa: BLE001 - the last chance to answer the request
            if isinstance(error, TimeoutError):
                error = ApiRequestError(504, f"the answer was not finished within {self._bounds.seconds:.0f} seconds")
            elif not isinstance(error, ApiRequestError):
                logger.exception("request %s failed", answer.id)
            if answer.status == 0:
                await convert_to_api_error(error).make_response(scope["path"])(scope, receive, answer.send_message)
        finally:
            self._metrics.record_request(scope, answer.status, time.monotonic() - start)

    def _check_access(self, scope: Scope) -> None:
        """Refuse a request with a wrong host, key or content type."""
        path, headers, bounds = scope["path"], Headers(scope=scope), self._bounds
        if bounds.hosts is not None and _requested_host(headers) not in bounds.hosts:
            raise ApiRequestError(403, "this server accepts local requests only; use the host 127.0.0.1 or localhost")
        if path in PUBLIC:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")  # RFC 9110: a scheme has any case
        keys = [headers.get("x-api-key", ""), given.strip() if scheme.lower() == "bearer" else ""]
        if bounds.key is not None and not any(_equal_constant_time(one, bounds.key) for one in keys):
            raise ApiRequestError(401, "a valid API key is required; send the header 'Authorization: Bearer KEY'")
        if scope["method"] != "POST":
            return
        if not headers.get("content-type", "").partition(";")[0].strip().lower().endswith("json"):
            raise ApiRequestError(415, "the body must be JSON; send the header 'Content-Type: application/json'")

    def _check_capacity(self) -> None:
        """Refuse a request while the server is full or shutting down."""
        if self.draining:
            raise ApiRequestError(503, "the server is shutting down", retry_after=10)
        if self.active >= self._bounds.requests:
            raise ApiRequestError(429, f"the server is busy with {self.active} requests", retry_after=1)

    async def _read_body(self, receive: Receive) -> Receive:
        """Read the whole body and return a `receive` that replays it.

        Raises:
            ApiRequestError: when the body is too long, regardless of its header, or takes too long.
        """
        seconds = min(self._bounds.body_seconds, self._bounds.seconds)
        try:
            async with asyncio.timeout(seconds):
                first = await _collect_body(receive, self._bounds.body)
        except TimeoutError:
            raise ApiRequestError(
                408, f"the body did not arrive within {seconds:.0f} seconds", code="timeout"
            ) from None
        messages = [first]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        return receive_again


async def _collect_body(receive: Receive, size: int) -> Message:
    """Return a message with a whole body of at most `size` bytes, or the disconnect message of the client."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if len(body) > size:
            raise ApiRequestError(413, f"the body has more than {size} bytes")
        if not message.get("more_body", False):
            return {"type": "http.request", "body": bytes(body), "more_body": False}
    return message


def _requested_host(headers: Headers) -> str:
    """Return the host name of a request, without the port."""
    return re.sub(r":\d+$", "", headers.get("host", "")).strip("[]").lower()


def _equal_constant_time(given: str, expected: str) -> bool:
    """Compare two strings in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


class _TrackedSender:
    """Sender of an answer that adds the request id and records the status (0: nothing was sent).

    Sending stops when the client reads nothing for `stalled` seconds.
    """

    def __init__(self, send: Send, headers: Headers, stalled: float) -> None:
        given = headers.get("x-request-id", "")
        self.id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.status = 0
        self._send, self._stalled = send, stalled

    async def send_message(self, message: Message) -> None:
        """Send a part of the answer.

        Raises:
            TimeoutError: when the client reads nothing.
        """
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.id
            headers["x-content-type-options"] = "nosniff"
        async with asyncio.timeout(self._stalled):
            await self._send(message)
