"""The routes, as one FastAPI application behind the gate."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from mega_eval.server import errors
from mega_eval.server.embeddings import EmbeddingRequest
from mega_eval.server.errors import ErrorBody, Refusal
from mega_eval.server.gate import Bounds, Gate
from mega_eval.server.responses import ResponsesRequest
from mega_eval.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from mega_eval.server.service import Running, Service

T = TypeVar("T")


def create_app(service: Service, bounds: Bounds) -> Gate:
    """The application; the service's driver has to be started before the first request."""
    app = FastAPI(
        title="mega",
        summary="OpenAI-compatible access to one language model and its adapters",
        version=service.version,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    errors.install(app)
    gate = Gate(app, bounds, service.metrics)
    _add_answers(app, service)
    _add_tokens(app, service)
    _add_facts(app, service, gate)
    _add_page(app)
    return gate


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        service.check_model(body.model)
        return await _answer(request, lambda: service.completion(body), body.stream, body.stream_options)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        service.check_model(body.model)
        return await _answer(request, lambda: service.chat(body), body.stream, body.stream_options)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a text or a conversation, without state."""
        service.check_model(body.model)
        return await _answer(request, lambda: service.response(body), body.stream, body.stream_options)

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Make vectors of texts, as the sentence-transformers folder declares, else the mean of the last hidden states."""
        service.check_model(body.model)
        return JSONResponse(await _unless_gone(request, service.embeddings(body)))


async def _answer(
    request: Request, begin: Callable[[], Awaitable[Running]], stream: bool | None, options: StreamOptions | None
) -> Response:
    if stream:
        return _EventStream(await begin(), options or StreamOptions())

    async def whole() -> dict[str, object]:
        return await (await begin()).whole()

    return JSONResponse(await _unless_gone(request, whole()))


class _EventStream(StreamingResponse):
    """Sends an answer as it comes. It ends with its client, even before the first chunk was asked for."""

    def __init__(self, running: Running, options: StreamOptions) -> None:
        super().__init__(running.chunks(options), media_type="text/event-stream")
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.close()


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives; it is cancelled when the client goes away."""
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Refusal(499, "the client has gone")
        return doing.result()
    finally:
        for task in (doing, gone):
            task.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Tokens of a text or of a conversation."""
        service.check_model(body.model)
        if body.messages is not None:
            tokens = await service.chat_prompt(body.messages, body)
        else:
            tokens = await service.encode(body.prompt or "", special=body.add_special_tokens)
        names = {"token_strs": service.token_names(tokens)} if body.return_token_strs else {}
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.max_length, **names}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of tokens."""
        service.check_model(body.model)
        return {"prompt": await service.decode(body.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, str | None]:
        """Special tokens and chat template of the tokenizer."""
        return service.tokenizer_info()


def _add_facts(app: FastAPI, service: Service, gate: Gate) -> None:
    def card(name: str) -> dict[str, Any]:
        adapter = name in service.adapters
        return {
            "id": name, "object": "model", "created": service.created, "owned_by": "mega",
            "max_model_len": service.max_length, "root": service.adapters[name] if adapter else service.name,
            "parent": service.name if adapter else None,
        }  # fmt: skip

    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model, and each of its adapters as a model of its own."""
        return {"object": "list", "data": [card(name) for name in (service.name, *service.adapters)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model of that name."""
        service.check_model(name)
        return card(name)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether requests are answered."""
        if service.driver.failure is not None:
            raise Refusal(503, "the engine has failed")
        if (seconds := service.driver.busy_seconds()) > service.seconds:
            raise Refusal(503, f"the engine hangs: its step has not ended for {seconds:.0f} seconds")
        if gate.draining:
            raise Refusal(503, "the server is shutting down")
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Of mega."""
        return {"version": service.version}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counts for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    page = (resources.files("mega_eval.server") / "page.html").read_text(encoding="utf-8")
    allowed = {f"{kind}-src": _hash_of(page, tag) for kind, tag in (("script", "script"), ("style", "style"))}
    policy = {
        "default-src": "'none'", **allowed, "connect-src": "'self'", "base-uri": "'none'", "form-action": "'none'",
        "frame-ancestors": "'none'",
    }  # fmt: skip
    headers = {"content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items())}

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page, headers=headers)


def _hash_of(page: str, tag: str) -> str:
    """What a policy calls the one script or style that stands in the page."""
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
