"""HTTP server of a model: sockets, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from mega_common.errors import ConfigError
from mega_common.progress_logging import logger
from mega_eval.server.api_errors import ApiRequestError
from mega_eval.server.application import create_application
from mega_eval.server.connection_limits import (
    ACCEPT,
    QUEUE,
    EventLoopErrorLogger,
    LimitedHttpProtocol,
    count_available_connections,
    make_http_protocol_class,
)
from mega_eval.server.request_gate import ServerLimits
from mega_eval.server.served_models import ServedModels
from mega_trainer.job.garbage_collection import exclude_objects_from_gc

STALLED = 120  # seconds after which the kernel drops a client that acknowledges no data


def bind_server_socket(host: str, port: int, key: str | None) -> socket.socket:
    """Return a socket bound to `host` and `port`, not yet listening; a non-loopback host requires the API `key`.
    Port 0 is any free port.

    Raises:
        ConfigError: when the address is invalid, not on this machine, in use, or public without an API key.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if key is None and not ipaddress.ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"--host {host} requires an API key, since other machines can reach the server",
                hint="set one with --api-key-file FILE or the environment variable MEGA_API_KEY, or use --host 127.0.0.1",
            )
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a previous server may linger
        found.bind(address)
    except OSError as error:
        hint = "use another --port; 0 selects a free one" if error.errno == errno.EADDRINUSE else None
        raise ConfigError(f"the server cannot listen on {host}:{port} ({error.strerror})", hint=hint) from None
    # accepted connections inherit these options: the kernel drops clients that vanish or stop reading
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED * 1000)
    return found


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return an application that pages of `origins` may call, or `app` itself if there are none."""
    if not origins:
        return app
    # outside of the gate, since the preflight requests of browsers have no API key
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
    )


class InferenceServer(uvicorn.Server):
    """HTTP server that runs until SIGTERM or SIGINT, then finishes open requests and refuses new ones.
    A second signal ends it at once.

    Plain uvicorn would close its socket first. Call `run(sockets=[...])`; afterwards `force_exit` is True if there was a
    second signal.

    Args:
        models: models to serve.
        bounds: limits of the server.
        drain: seconds to finish open requests after the first signal.
    """

    def __init__(self, models: ServedModels, bounds: ServerLimits, *, drain: float) -> None:
        self.gate = create_application(models, bounds)
        limits = replace(
            bounds.connections, count=count_available_connections(bounds.connections.count + bounds.requests)
        )
        config = uvicorn.Config(
            _with_cors(self.gate, bounds.origins),
            http=make_http_protocol_class(limits),
            ws="none",
            backlog=ACCEPT,
            log_config=None,
            log_level="critical",  # the gate logs errors
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=5,
            server_header=False,
            proxy_headers=False,
        )
        super().__init__(config)
        self._services, self._drain = models.services, drain
        self._deadline = 0.0
        self.engine_ended = False

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the engines and serve HTTP on the bound `sockets` until shutdown.
        `engine_ended` is then True if the engines' threads have ended too.
        """
        for service in self._services:
            service.driver.start_thread()
        try:
            with exclude_objects_from_gc():
                super().run(sockets)
        finally:
            ended = [service.driver.stop_thread() for service in self._services]
            self.engine_ended = all(ended)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen on the sockets; uvicorn calls it."""
        asyncio.get_running_loop().set_exception_handler(EventLoopErrorLogger())
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(QUEUE)  # uvicorn's `backlog` also sets the number of connections accepted at a time
        host, port, *_ = self.servers[0].sockets[0].getsockname()
        shown = f"[{host}]" if ":" in host else host
        names = ", ".join(repr(service.name) for service in self._services)
        logger.info("serving %s at http://%s:%d (Ctrl-C ends)", names, shown, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start the shutdown of the server after a signal, and end it at once after a second one.
        The uvicorn server calls it for SIGTERM and SIGINT.
        """
        if self.gate.draining:
            self.should_exit = self.force_exit = True
            return
        self.gate.draining, self._deadline = True, time.monotonic() + self._drain
        if self.gate.active:
            message = "finishing %d requests for at most %.0f seconds; another signal ends the server at once"
            logger.info(message, self.gate.active, self._drain)

    async def on_tick(self, counter: int) -> bool:
        """Close connections that timed out, abort requests after the shutdown's deadline, and return whether to exit.
        The uvicorn server calls it ten times a second.
        """
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            if isinstance(connection, LimitedHttpProtocol):
                connection.close_if_timed_out(now)
        if self.gate.draining and not self.should_exit:
            late = time.monotonic() >= self._deadline
            if late and self.gate.active:
                logger.warning("%d unfinished requests are aborted", self.gate.active)
                for service in self._services:
                    service.driver.abort_all_requests(ApiRequestError(503, "the server is shutting down"))
            self.should_exit = late or not self.gate.active
        return await super().on_tick(counter)
