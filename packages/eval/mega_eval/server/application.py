"""Routes of the server as one FastAPI application behind the request gate."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import resources
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import Receive, Scope, Send

from mega_eval.server import api_errors
from mega_eval.server.api_errors import AnthropicErrorBody, ApiRequestError, ErrorBody
from mega_eval.server.embeddings_api import EmbeddingRequest
from mega_eval.server.messages_api import CountTokensRequest, MessagesRequest
from mega_eval.server.request_gate import PAGE_FILES, RequestCheckMiddleware, ServerLimits
from mega_eval.server.request_schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from mega_eval.server.rerank_api import RerankRequest
from mega_eval.server.responses_api import ResponsesRequest
from mega_eval.server.running_answer import RunningAnswer
from mega_eval.server.served_models import LoadAdapterRequest, ServedModels, UnloadAdapterRequest

T = TypeVar("T")
MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": AnthropicErrorBody}, "5XX": {"model": AnthropicErrorBody},
}  # fmt: skip


def create_application(models: ServedModels, bounds: ServerLimits) -> RequestCheckMiddleware:
    """Return the ASGI application of the server, behind its request checks.
    Start the engine drivers of `models` before the first request.
    """
    app = FastAPI(
        title="mega",
        summary="OpenAI-compatible access to language models and their adapters",
        version=models.main.version,
        docs_url=None,  # its page loads scripts from a CDN
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    api_errors.install_error_handlers(app)
    gate = RequestCheckMiddleware(app, bounds, models.main.metrics)
    _add_answer_routes(app, models)
    _add_embedding_routes(app, models)
    _add_tokenizer_routes(app, models)
    _add_model_routes(app, models)
    _add_info_routes(app, models, gate)
    _add_web_page(app)
    return gate


def _add_answer_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the routes that generate answers."""

    @app.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        service = models.find_model_service(body.model)
        return await _send_answer(request, lambda: service.start_completion(body), body.stream, body.stream_options)

    @app.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        service = models.find_model_service(body.model)
        return await _send_answer(request, lambda: service.start_chat_answer(body), body.stream, body.stream_options)

    @app.post("/v1/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a text or a conversation, without stored state."""
        service = models.find_model_service(body.model)
        return await _send_answer(request, lambda: service.start_response(body), body.stream, body.stream_options)

    @app.post("/v1/messages", responses=MESSAGES_ERRORS)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answer in a conversation, in the form of Anthropic's API."""
        service = models.find_model_service(body.model)
        return await _send_answer(request, lambda: service.start_messages_answer(body), body.stream, None)

    @app.post("/v1/messages/count_tokens", responses=MESSAGES_ERRORS)
    async def count_message_tokens(body: CountTokensRequest) -> dict[str, int]:
        """Count the prompt tokens of a conversation, in the form of Anthropic's API."""
        return {"input_tokens": await models.find_model_service(body.model).count_message_tokens(body)}


def _add_embedding_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the routes of embeddings."""

    @app.post("/v1/embeddings")
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Compute embedding vectors of texts for /v1/embeddings.
        They are computed as the sentence-transformers folder declares, else as the mean of the last hidden states.
        """
        service = models.find_model_service(body.model)
        return JSONResponse(await _cancel_on_disconnect(request, service.compute_embeddings(body)))

    @app.post("/rerank", include_in_schema=False)
    @app.post("/v2/rerank", include_in_schema=False)
    @app.post("/v1/rerank")
    async def rank_documents(body: RerankRequest, request: Request) -> Response:
        """Order documents by the similarity of their embeddings to that of a query."""
        service = models.find_model_service(body.model)
        return JSONResponse(await _cancel_on_disconnect(request, service.rank_documents(body)))


async def _send_answer(
    request: Request, begin: Callable[[], Awaitable[RunningAnswer]], stream: bool | None, options: StreamOptions | None
) -> Response:
    """Return the answer, whole or as an event stream."""
    if stream:
        return _EventStream(await begin(), options or StreamOptions())

    async def build_whole_answer() -> dict[str, object]:
        return await (await begin()).build_answer()

    return JSONResponse(await _cancel_on_disconnect(request, build_whole_answer()))


class _EventStream(StreamingResponse):
    """Streaming response that ends with its client, even before the first chunk is requested."""

    def __init__(self, running: RunningAnswer, options: StreamOptions) -> None:
        super().__init__(running.stream_chunks(options), media_type="text/event-stream")
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.release_requests()


async def _cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled when the client disconnects."""
    answer = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ApiRequestError(499, "the client has disconnected")
        return answer.result()
    finally:
        for task in (answer, disconnect):
            task.cancel()
        await asyncio.gather(answer, disconnect, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_tokenizer_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the routes of the tokenizer."""

    @app.post("/tokenize")
    async def tokenize_text(body: TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a text or of a conversation."""
        service = models.find_model_service(body.model)
        if body.messages is not None:
            tokens = await service.encode_chat_prompt(body.messages, body)
        else:
            tokens = await service.encode_text(body.prompt or "", special=body.add_special_tokens)
        names = {"token_strs": service.get_vocabulary_entries(tokens)} if body.return_token_strs else {}
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.max_length, **names}

    @app.post("/detokenize")
    async def detokenize_tokens(body: DetokenizeRequest) -> dict[str, str]:
        """Return the text of tokens."""
        service = models.find_model_service(body.model)
        return {"prompt": await service.decode_tokens(body.tokens)}

    @app.get("/tokenizer_info")
    async def get_tokenizer_info() -> dict[str, str | None]:
        """Return the special tokens and the chat template of the tokenizer."""
        return models.main.describe_tokenizer()


def _add_model_routes(app: FastAPI, models: ServedModels) -> None:
    """Add the routes about the models and their adapters."""

    def make_model_card(name: str) -> dict[str, Any]:
        service = models.find_model_service(name)
        adapter = name in service.adapters
        return {
            "id": name, "object": "model", "created": service.created, "owned_by": "mega",
            "max_model_len": service.max_length, "images": service.vision is not None, "root": service.adapters[name] if adapter else service.name,
            "parent": service.name if adapter else None,
        }  # fmt: skip

    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """List the models and their adapters, each as a model."""
        return {"object": "list", "data": [make_model_card(name) for name in models.list_model_names()]}

    @app.get("/v1/models/{name:path}")
    async def get_model_card(name: str) -> dict[str, Any]:
        """Return the model of that name."""
        return make_model_card(name)

    @app.post("/v1/load_lora_adapter")
    async def load_adapter(body: LoadAdapterRequest) -> dict[str, Any]:
        """Load a LoRA adapter as a model of its own."""
        await models.load_adapter(body)
        return make_model_card(body.lora_name)

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: UnloadAdapterRequest) -> dict[str, Any]:
        """Remove a LoRA adapter that clients have named as a model."""
        await models.unload_adapter(body)
        return {"id": body.lora_name, "object": "model", "deleted": True}


def _add_info_routes(app: FastAPI, models: ServedModels, gate: RequestCheckMiddleware) -> None:
    """Add the routes about the state of the server."""

    @app.get("/health")
    async def check_health() -> dict[str, str]:
        """Return status 200 if requests are answered, else 503."""
        for service in models.services:
            if service.driver.failure is not None:
                raise ApiRequestError(503, "the engine has failed")
            if (seconds := service.driver.busy_seconds()) > service.seconds:
                raise ApiRequestError(503, f"the engine hangs: its step has not ended after {seconds:.0f} seconds")
        if gate.draining:
            raise ApiRequestError(503, "the server is shutting down")
        return {"status": "ok"}

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        """Return the version of mega."""
        return {"version": models.main.version}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        """Return counters for Prometheus."""
        return Response(models.main.metrics.render_metrics(), media_type=CONTENT_TYPE_LATEST)


def _add_web_page(app: FastAPI) -> None:
    """Add the routes of the web page and its files."""
    folder = resources.files("mega_eval.server") / "page"
    # data: images that the user adds
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    for path, (name, media_type) in PAGE_FILES.items():
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
        response = partial(Response, (folder / name).read_bytes(), headers=headers, media_type=media_type)
        app.add_api_route(path, _make_page_route(response), include_in_schema=False, response_class=Response)


def _make_page_route(make_response: Callable[[], Response]) -> Callable[[], Awaitable[Response]]:
    """Return the route of one file of the page."""

    async def get_page_file() -> Response:
        return make_response()

    return get_page_file
