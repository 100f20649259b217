"""Endpoint /v1/responses, OpenAI's Responses API: text in and out, with instructions, formats, function calls, reasoning
and event streams.

The server keeps no state: `previous_response_id` and conversations are refused, and `store` has no effect.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from mega_eval.server.answer_formats import ChoiceDelta, TokenUsage, ToolCallDelta, format_sse_event
from mega_eval.server.api_errors import ApiRequestError
from mega_eval.server.output_constraints import JsonObject
from mega_eval.server.request_schemas import (
    ChatMessage,
    ChatRequest,
    ContentField,
    RequestBody,
    StreamOptions,
    make_chat_request,
)
from mega_eval.server.request_validation import Many, StrictRequestModel, make_field_error, make_union_validator


class ResponsesInputMessage(ChatMessage):
    """Message in the field `input` of a request to /v1/responses."""

    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponsesFunctionCall(StrictRequestModel):
    """Function call of an earlier answer, in the field `input` of a request to /v1/responses."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class ResponsesCallOutput(StrictRequestModel):
    """Result of a function call, in the field `input` of a request to /v1/responses."""

    type: Literal["function_call_output"]
    call_id: str
    output: ContentField
    id: str | None = None
    status: str | None = None

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        if not isinstance(self.output, str) and any(part.image is not None for part in self.output):
            raise make_field_error("'output' must be text; send images in a message of the user", "output")
        return self


class ReasoningText(StrictRequestModel):
    """Part of the reasoning of an earlier answer."""

    model_config = ConfigDict(extra="ignore", strict=True)
    text: str


class ResponsesReasoning(StrictRequestModel):
    """Reasoning of an earlier answer, in the field `input` of a request to /v1/responses."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: Literal["reasoning"]
    content: Many[ReasoningText] | None = None


ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
ResponsesItem = Annotated[
    Annotated[ResponsesInputMessage, Tag("[message]")]
    | Annotated[ResponsesFunctionCall, Tag("[function_call]")]
    | Annotated[ResponsesCallOutput, Tag("[function_call_output]")]
    | Annotated[ResponsesReasoning, Tag("[reasoning]")],
    Discriminator(lambda value: f"[{value.get('type', 'message') if isinstance(value, dict) else value.type}]"),
]


def validate_responses_input_item(value: Any) -> Any:
    """Return an item of a /v1/responses request's `input` unchanged, after checking that its type is supported.

    Raises:
        PydanticCustomError: for an item of another type.
    """
    if not isinstance(value, dict):
        raise make_field_error("must be a message: an object with 'role' and 'content'")
    if (kind := value.get("type", "message")) not in ITEM_TYPES:
        raise make_field_error(f"has type {str(kind)[:50]!r}, which is not supported; send {', '.join(ITEM_TYPES)}")
    return value


class ResponsesTool(StrictRequestModel):
    """Function that the model may call, in a request to /v1/responses."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ResponsesToolChoice(StrictRequestModel):
    """Value of `tool_choice` that requires a call of one named function, in a request to /v1/responses."""

    type: Literal["function"]
    name: str


class ResponsesTextFormat(StrictRequestModel):
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


class ResponsesTextSettings(StrictRequestModel):
    """Field `text` of a request to /v1/responses."""

    format: ResponsesTextFormat | None = None


ResponseInputField = Annotated[
    Annotated[Annotated[str, Field(min_length=1)], Tag("[text]")]
    | Annotated[
        Annotated[Many[Annotated[ResponsesItem, BeforeValidator(validate_responses_input_item)]], Field(min_length=1)],
        Tag("[messages]"),
    ],
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
    text: ResponsesTextSettings | None = None
    tools: Annotated[list[ResponsesTool] | None, Field(max_length=128)] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ResponsesToolChoice | None,
        Field(),
        make_union_validator('"none", "auto", "required" or {"type": "function", "name": NAME}'),
    ] = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def to_chat_request(self) -> ChatRequest:
        """Return the equivalent request to /v1/chat/completions."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        form = None if self.text is None or self.text.format is None else self.text.format.to_response_format()
        tools = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in self.tools or ()
        ]
        choice: Any = self.tool_choice
        if isinstance(choice, ResponsesToolChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        return make_chat_request({
            "model": self.model, "messages": [*system, *self._list_messages()], "max_tokens": self.max_output_tokens,
            "temperature": self.temperature, "top_p": self.top_p, "response_format": form, "tools": tools or None,
            "tool_choice": choice if tools else None, "parallel_tool_calls": self.parallel_tool_calls,
        })  # fmt: skip

    def _list_messages(self) -> list[Any]:
        """Return the input as messages of a chat; calls and reasoning belong to one message of the assistant."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[Any] = []
        for item in self.input:
            if isinstance(item, ResponsesInputMessage):
                last = messages[-1] if messages else None
                if item.role == "assistant" and isinstance(last, dict) and last["role"] == "assistant":
                    last["content"] = item.to_template_message()["content"]
                else:
                    messages.append(item)
            elif isinstance(item, ResponsesCallOutput):
                content = item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            else:
                last = messages[-1] if messages else None
                if isinstance(last, ResponsesInputMessage) and last.role == "assistant":
                    messages[-1] = {"role": "assistant", "content": last.to_template_message()["content"]}
                elif not isinstance(last, dict) or last["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                if isinstance(item, ResponsesReasoning):
                    messages[-1]["reasoning_content"] = "".join(part.text for part in item.content or ())
                else:
                    function = {"name": item.name, "arguments": item.arguments}
                    call = {"id": item.call_id, "type": "function", "function": function}
                    messages[-1].setdefault("tool_calls", []).append(call)
        return messages


ItemKind = Literal["message", "reasoning", "function_call"]
EVENTS: Mapping[ItemKind, str] = {
    "message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments",
}  # fmt: skip
PREFIXES: Mapping[ItemKind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass
class ResponsesOutputItem:
    """Item of the field `output` of an answer of /v1/responses.
    It is text, reasoning, or the JSON arguments of a call of function `name`; `closed` is its status once it is
    complete.
    """

    kind: ItemKind
    name: str = ""
    call_id: str = ""
    text: str = ""
    closed: str = ""

    def __post_init__(self) -> None:
        self.id = f"{PREFIXES[self.kind]}_{uuid.uuid4().hex}"

    def format_item(self, status: str) -> dict[str, Any]:
        """Return this output item as JSON of the Responses API."""
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return {**head, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        if self.kind == "reasoning":
            return {
                **head,
                "summary": [],
                "content": [{"type": "reasoning_text", "text": self.text}] if self.text else [],
            }
        content = [] if status == "in_progress" else [_text_part(self.text)]
        return {**head, "role": "assistant", "content": content}


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
        self._id = f"resp_{uuid.uuid4().hex}"
        self._items: list[ResponsesOutputItem] = []

    async def build_answer(self, parts: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        """Collect all generated content and return the complete answer of /v1/responses as a JSON object."""
        finish = None
        async for part in parts:
            finish = part.finish
            for _ in self._stream_part(part):
                pass
        list(self._close_item(finish))
        return self._format_response(finish or "stop")

    async def stream_chunks(self, parts: AsyncIterator[ChoiceDelta], _: StreamOptions) -> AsyncIterator[bytes]:
        """Yield the answer as the server-sent events of /v1/responses, such as response.output_text.delta."""
        yield self._format_event("response.created", response=self._format_response(None))
        yield self._format_event("response.in_progress", response=self._format_response(None))
        finish = None
        async for part in parts:
            finish = part.finish
            for event in self._stream_part(part):
                yield event
        for event in self._close_item(finish):
            yield event
        last = self._format_response(finish or "stop")
        yield self._format_event(f"response.{last['status']}", response=last)

    def _stream_part(self, part: ChoiceDelta) -> Iterator[bytes]:
        """Add a part to the output items, and yield its events."""
        self.usage.completion += part.count
        if part.reasoning:
            yield from self._extend_item("reasoning", part.reasoning)
        if part.text:
            yield from self._extend_item("message", part.text)
        for call in part.calls:
            yield from self._extend_item("function_call", call.arguments, call)
        if part.finish is not None and not self._items:
            yield from self._extend_item("message", "")

    def _extend_item(self, kind: ItemKind, text: str, call: ToolCallDelta | None = None) -> Iterator[bytes]:
        """Add text to the last output item, or to a new one for another kind or another call, and yield the events."""
        if not self._items or self._items[-1].kind != kind or (call is not None and call.name is not None):
            yield from self._close_item(None)
            item = ResponsesOutputItem(kind, name=(call and call.name) or "", call_id=(call and call.id) or "")
            self._items.append(item)
            shown = item.format_item("in_progress")
            yield self._format_event("response.output_item.added", output_index=len(self._items) - 1, item=shown)
            if kind == "message":
                yield self._format_event("response.content_part.added", **self._locate_item(), part=_text_part(""))
        self._items[-1].text += text
        if text:
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._format_event(f"response.{EVENTS[kind]}.delta", **self._locate_item(), delta=text, **more)

    def _close_item(self, finish: str | None) -> Iterator[bytes]:
        """Yield the events at the end of the last output item."""
        if not self._items or self._items[-1].closed:
            return
        item = self._items[-1]
        item.closed = "incomplete" if finish == "length" else "completed"
        place, done = self._locate_item(), f"response.{EVENTS[item.kind]}.done"
        if item.kind == "message":
            yield self._format_event(done, **place, text=item.text, logprobs=[])
            yield self._format_event("response.content_part.done", **place, part=_text_part(item.text))
        elif item.kind == "reasoning":
            yield self._format_event(done, **place, text=item.text)
        else:
            yield self._format_event(done, **place, name=item.name, arguments=item.text)
        shown = item.format_item(item.closed)
        yield self._format_event("response.output_item.done", output_index=len(self._items) - 1, item=shown)

    def _locate_item(self) -> dict[str, Any]:
        """Return the fields that name the last output item and its content in events."""
        at = {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}
        return at if self._items[-1].kind == "function_call" else {**at, "content_index": 0}

    def format_stream_error(self, error: ApiRequestError) -> bytes:
        """Return the server-sent event `error` of a stream of the Responses API, as bytes."""
        return self._format_event("error", code=error.code, message=error.message, param=error.param)

    def _format_event(self, kind: str, **more: Any) -> bytes:
        """Return the next event of the stream."""
        body = {"type": kind, "sequence_number": self._sequence, **more}
        self._sequence += 1
        return format_sse_event(body, kind)

    def _format_response(self, finish: str | None) -> dict[str, Any]:
        """Return the response object; it is in progress while `finish` is None."""
        status = {None: "in_progress", "length": "incomplete"}.get(finish, "completed")
        form = None if self.body.text is None else self.body.text.format
        given = self.body.tool_choice
        choice = given.model_dump() if isinstance(given, ResponsesToolChoice) else given
        shown = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status, "model": self.model,
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
            "instructions": self.body.instructions, "max_output_tokens": self.body.max_output_tokens,
            "metadata": (self.body.model_extra or {}).get("metadata") or {}, "parallel_tool_calls": self.body.parallel_tool_calls is not False,
            "previous_response_id": None, "temperature": self.body.temperature, "top_p": self.body.top_p,
            "text": {"format": shown}, "tool_choice": choice or "auto", "tools": [tool.model_dump() for tool in self.body.tools or ()],
            "truncation": "disabled", "store": False,
            "output": [item.format_item(item.closed) for item in self._items] if finish is not None else [],
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
