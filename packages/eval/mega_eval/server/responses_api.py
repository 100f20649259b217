"""Endpoint /v1/responses, OpenAI's Responses API: text in and out, with instructions, formats and event streams.

The server keeps no state: `previous_response_id` and conversations are refused, and `store` has no effect.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from mega_eval.server.answer_formats import AnswerPart, TokenUsage
from mega_eval.server.api_errors import ApiRequestError
from mega_eval.server.output_constraints import JsonObject
from mega_eval.server.request_schemas import ChatMessage, ChatRequest, RequestBody, StreamOptions
from mega_eval.server.request_validation import Many, StrictRequestModel, make_field_error


class ResponsesInputMessage(ChatMessage):
    """Message in the field `input` of a request to /v1/responses."""

    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_item(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise make_field_error("must be a message: an object with 'role' and 'content'")
        kind = value.get("type", "message")
        if kind != "message":
            raise make_field_error(f"has type {str(kind)[:50]!r}, which is not supported; send items of type 'message'")
        return value


class TextFormat(StrictRequestModel):
    """Field `text.format` of a request to /v1/responses: free text, JSON, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[JsonObject | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise make_field_error("'schema' is required with type 'json_schema', and not supported with other types")
        return self

    def to_response_format(self) -> dict[str, Any]:
        """Return the text format as the equivalent field `response_format` of a chat request."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "", "schema": self.json_schema}}


class TextSettings(StrictRequestModel):
    """Field `text` of a request to /v1/responses."""

    format: TextFormat | None = None


ResponseInputField = Annotated[
    Annotated[Annotated[str, Field(min_length=1)], Tag("[text]")]
    | Annotated[Annotated[Many[ResponsesInputMessage], Field(min_length=1)], Tag("[messages]")],
    Discriminator(
        lambda value: {str: "[text]", list: "[messages]"}.get(type(value)),
        custom_error_type="union",
        custom_error_message="must be a text or a list of messages",
    ),
]


class ResponsesRequest(RequestBody):
    """Body of a request to /v1/responses."""

    input: ResponseInputField
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    text: TextSettings | None = None
    tools: list[Any] | None = None
    tool_choice: Annotated[Any, Field(description="no effect without tools")] = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if self.tools:
            raise make_field_error("'tools' is not supported in /v1/responses; use /v1/chat/completions", "tools")
        return self

    def to_chat_request(self) -> ChatRequest:
        """Return the equivalent request to /v1/chat/completions."""
        items = [ResponsesInputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        form = None if self.text is None or self.text.format is None else self.text.format.to_response_format()
        return ChatRequest.model_validate({
            "model": self.model, "messages": [*system, *(item.to_template_message() for item in items)],
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p, "response_format": form,
        })  # fmt: skip


@dataclass
class ResponsesAnswerBuilder:
    """Builder of one JSON answer of /v1/responses.

    Attributes:
        body: the request.
        model: name of the served model.
        usage: token counts so far.
    """

    body: ResponsesRequest
    model: str
    usage: TokenUsage

    def __post_init__(self) -> None:
        self._created, self._sequence = int(time.time()), 0
        self._id, self._item = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"

    async def build_answer(self, parts: AsyncIterator[AnswerPart]) -> dict[str, Any]:
        """Collect all generated content and return the complete answer of /v1/responses as a JSON object."""
        text, finish = "", None
        async for part in parts:
            text, finish = text + part.text, part.finish
            self.usage.completion += part.count
        return self._format_response(text, finish)

    async def stream_chunks(self, parts: AsyncIterator[AnswerPart], _: StreamOptions) -> AsyncIterator[bytes]:
        """Yield the answer as the server-sent events of /v1/responses, such as response.output_text.delta."""
        location = {"item_id": self._item, "output_index": 0, "content_index": 0}
        yield self._format_event("response.created", response=self._format_response("", None))
        yield self._format_event("response.in_progress", response=self._format_response("", None))
        started = {"id": self._item, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        yield self._format_event("response.output_item.added", output_index=0, item=started)
        yield self._format_event("response.content_part.added", **location, part=_text_part(""))
        text, finish = "", None
        async for part in parts:
            text, finish = text + part.text, part.finish
            self.usage.completion += part.count
            if part.text:
                yield self._format_event("response.output_text.delta", **location, delta=part.text, logprobs=[])
        yield self._format_event("response.output_text.done", **location, text=text, logprobs=[])
        yield self._format_event("response.content_part.done", **location, part=_text_part(text))
        yield self._format_event("response.output_item.done", output_index=0, item=self._format_message(text, finish))
        last = self._format_response(text, finish)
        yield self._format_event(f"response.{last['status']}", response=last)

    def format_stream_error(self, error: ApiRequestError) -> bytes:
        """Return the event of an error in a stream."""
        return self._format_event("error", code=error.code, message=error.message, param=error.param)

    def _format_event(self, kind: str, **more: Any) -> bytes:
        """Return the next event of the stream."""
        body = {"type": kind, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return f"event: {kind}\ndata: {json.dumps(body, separators=(',', ':'))}\n\n".encode()

    def _format_message(self, text: str, finish: str | None) -> dict[str, Any]:
        """Return the output message."""
        status = "incomplete" if finish == "length" else "completed"
        return {
            "id": self._item, "type": "message", "role": "assistant", "status": status, "content": [_text_part(text)],
        }  # fmt: skip

    def _format_response(self, text: str, finish: str | None) -> dict[str, Any]:
        """Return the response object; it is in progress while `finish` is None."""
        status = {None: "in_progress", "length": "incomplete"}.get(finish, "completed")
        form = None if self.body.text is None else self.body.text.format
        shown = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "model": self.model,
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
            "instructions": self.body.instructions, "max_output_tokens": self.body.max_output_tokens,
            "metadata": (self.body.model_extra or {}).get("metadata") or {}, "parallel_tool_calls": True,
            "previous_response_id": None, "temperature": self.body.temperature, "top_p": self.body.top_p,
            "text": {"format": shown}, "tool_choice": "auto", "tools": [], "truncation": "disabled", "store": False,
            "output": [] if finish is None else [self._format_message(text, finish)],
            "usage": None if finish is None else self._format_usage(),
        }  # fmt: skip

    def _format_usage(self) -> dict[str, Any]:
        """Return the token counts in the form of the API."""
        total = self.usage.prompt + self.usage.completion
        return {
            "input_tokens": self.usage.prompt, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.usage.completion, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total,
        }  # fmt: skip


def _text_part(text: str) -> dict[str, Any]:
    """Return a text part of the output."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
