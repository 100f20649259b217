"""Servers in a thread of the test's process, with real engines or scripted ones."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mega_common.errors import DataError
from mega_data.chat.chat_template import read_chat_template
from mega_data.tokenizer import Tokenizer
from mega_eval.engine_requests import EngineRequest, GenerationEvent
from mega_eval.server.embeddings_api import ServedEmbedder
from mega_eval.server.engine_driver import EngineDriver
from mega_eval.server.inference_server import InferenceServer, bind_server_socket
from mega_eval.server.model_service import ModelService
from mega_eval.server.request_gate import ServerLimits
from mega_eval.server.served_models import ServedModels
from mega_eval.server.server_metrics import ServerMetrics
from mega_eval.text_stream import Continuation


@dataclass
class Scripted:
    """An engine that says `text` at each step and never comes to an end by itself, while `go` is set."""

    text: str = "x"
    error: Exception | None = None
    go: threading.Event = field(default_factory=threading.Event)
    requests: dict[int, EngineRequest] = field(default_factory=dict)
    said: dict[int, int] = field(default_factory=dict)
    num_waiting = num_pages = num_free_pages = 0

    @property
    def num_running(self) -> int:
        return len(self.requests)

    def add_request(self, request: EngineRequest) -> int:
        number = len(self.said)
        self.requests[number], self.said[number] = request, 0
        return number

    def cancel_request(self, request: int) -> None:
        self.requests.pop(request, None)

    def drop_all_requests(self) -> None:
        self.requests.clear()

    def step(self, *, isolate: bool = False) -> list[GenerationEvent]:
        if not self.go.wait(0.01):
            return []
        if self.error is not None:
            raise self.error
        return [self._event(number, request) for number, request in list(self.requests.items())]

    def _event(self, number: int, request: EngineRequest) -> GenerationEvent:
        self.said[number] += 1
        finish = "length" if self.said[number] == request.limits.max_new_tokens else None
        if finish:
            del self.requests[number]
        return GenerationEvent(number, self.text, [0], [], None, finish)


class Playback(Scripted):
    """An engine that answers with prepared texts, in order and token by token, as far as the limits of a request let it.

    `prompts` are the texts of the prompts so far.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tokenizer, self.answers, self.prompts = Tokenizer(folder), list[str](), list[str]()
        self.texts: dict[int, tuple[Continuation, list[int]]] = {}
        self.go.set()

    def add_request(self, request: EngineRequest) -> int:
        number = super().add_request(request)
        answer = self.tokenizer.encode(self.answers.pop(0))
        self.prompts.append(self.tokenizer.decode(request.prompt))
        self.texts[number] = Continuation(self.tokenizer, request.limits, request.prompt), answer
        return number

    def _event(self, number: int, request: EngineRequest) -> GenerationEvent:
        text, left = self.texts[number]
        token = left.pop(0) if left else next(iter(request.limits.ends))
        new = text.append_token(token)
        if text.finish:
            del self.requests[number]
        return GenerationEvent(number, new, [token], [], None, text.finish, stop=text.stop)


def service_of(
    engine: Any,
    tokenizer: Path,
    *,
    most: int = 64,
    max_length: int = 256,
    seconds: float = 60,
    ends: frozenset[int] | None = None,
    adapters: Mapping[str, str] | None = None,
    embedder: ServedEmbedder | str | None = None,
    name: str = "tiny",
) -> ModelService:
    words, template = Tokenizer(tokenizer), None
    with contextlib.suppress(DataError):
        template = read_chat_template(words.path)
    return ModelService(
        name=name, version="1.2", driver=EngineDriver(engine, max_requests=most), tokenizer=words, template=template,
        ends=frozenset({words.eos_id} - {None}) if ends is None else ends, default_sampling={}, max_length=max_length, vocab_size=words.vocab_size, seconds=seconds,
        metrics=ServerMetrics(engine), adapters=adapters or {}, embedder=embedder, source=str(tokenizer),
    )  # fmt: skip


@contextlib.contextmanager
def serving(
    service: ModelService,
    *others: ModelService,
    adapter_folder: Path | None = None,
    key: str | None = None,
    requests: int = 64,
    max_body: int = 100_000,
    drain: float = 30,
    **bounds: Any,
) -> Iterator[tuple[str, InferenceServer]]:
    """A server on a free port of this machine; its address without the path. It ends as by SIGTERM."""
    hosts = None if key else ("127.0.0.1", "localhost")
    listener = bind_server_socket("127.0.0.1", 0, key)
    server = InferenceServer(
        ServedModels([service, *others], adapter_folder),
        ServerLimits(key, hosts, requests, service.seconds, max_body, **bounds),
        drain=drain,
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        if not server.gate.draining:
            server.handle_exit(signal.SIGTERM, None)
        thread.join(30)
    assert not thread.is_alive()


def until(true: Callable[[], Any], seconds: float = 60) -> None:
    """Wait until something is the case."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.01)
