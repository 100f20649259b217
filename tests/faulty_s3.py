"""An S3 server for tests (moto) that answers some of its requests wrongly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Kind = Literal["error", "lost", "reset", "short", "cut", "whole", "shifted", "refused keys", "hidden", "late error"]
Environ = dict[str, Any]
StartResponse = Callable[..., Any]

SETTINGS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass
class Fault:
    """One kind of wrong answer, given to the next `times` requests of `method` whose URL contains `part`.

    error: status and code instead of an answer; lost: the same, after the request was carried out; reset: the
    connection is closed; short: half of the body, with a Content-Length that agrees; cut: half of the body, with a
    Content-Length of all of it; whole: the whole object where a range is asked for; shifted: a range of the right length
    that begins one byte later; refused keys: a bulk deletion that deletes nothing; hidden: an empty listing; late error:
    status 200 with an error as its body.
    """

    kind: Kind
    method: str = "GET"
    part: str = "/"
    status: int = 500
    code: str = "InternalError"
    times: int = 1

    def matches(self, environ: Environ) -> bool:
        """Return whether this request gets the wrong answer; counts it."""
        url = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
        if self.times <= 0 or environ["REQUEST_METHOD"] != self.method or self.part not in url:
            return False
        if self.kind in ("whole", "shifted") and "HTTP_RANGE" not in environ:
            return False
        self.times -= 1
        return True


class FaultyStore:
    """WSGI application in front of moto's: answers as moto does, or as a fault says."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.endpoint = ""
        self._moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        fault = next((fault for fault in self.faults if fault.matches(environ)), None)
        if fault is None:
            return self._moto(environ, start_response)  # type: ignore[no-any-return]
        return self._answer(fault, environ, start_response)

    def _answer(self, fault: Fault, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        error = f"<Error><Code>{fault.code}</Code><Message>made by a test</Message></Error>".encode()
        if fault.kind in ("error", "lost"):
            if fault.kind == "lost":
                self._ask(environ)
            else:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _respond(start_response, f"{fault.status} made", [], b"" if fault.method == "HEAD" else error)
        if fault.kind == "late error":
            return _respond(start_response, "200 OK", [], error)
        if fault.kind == "refused keys":
            listed = b"<DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code></Error></DeleteResult>"
            return _respond(start_response, "200 OK", [], listed)
        if fault.kind == "reset":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError
        return self._change(fault, environ, start_response)

    def _change(self, fault: Fault, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if fault.kind == "whole":
            del environ["HTTP_RANGE"]
        elif fault.kind == "shifted":
            begin, end = environ["HTTP_RANGE"].removeprefix("bytes=").split("-")
            environ["HTTP_RANGE"] = f"bytes={int(begin) + 1}-{int(end) + 1}"
        status, headers, body = self._ask(environ)
        if fault.kind == "hidden":
            body = b"<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
        length = len(body)
        if fault.kind in ("short", "cut"):
            body = body[: length // 2]
        return _respond(start_response, status, headers, body, length if fault.kind == "cut" else len(body))

    def _ask(self, environ: Environ) -> tuple[str, list[tuple[str, str]], bytes]:
        """Return moto's answer."""
        answer: list[Any] = []
        body = b"".join(self._moto(environ, lambda *given: answer.extend(given[:2])))
        return answer[0], answer[1], body


def _respond(
    start_response: StartResponse, status: str, headers: list[tuple[str, str]], body: bytes, length: int | None = None
) -> Iterable[bytes]:
    kept = [(name, value) for name, value in headers if name.lower() not in ("content-length", "content-range")]
    start_response(status, [*kept, ("Content-Length", str(len(body) if length is None else length))])
    return [body]


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def faulty_store() -> Iterator[FaultyStore]:
    """Serve a store on a port of 127.0.0.1 while the block runs."""
    store = FaultyStore()
    server = make_server("127.0.0.1", 0, store, threaded=True, request_handler=_Quiet)
    store.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
