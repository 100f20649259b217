"""Endpoint /v1/messages, Anthropic's Messages API: conversations with tools and reasoning, whole or as event streams."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from mega_eval.server.answer_formats import ChoiceDelta, TokenUsage, format_sse_event
from mega_eval.server.api_errors import ApiRequestError
from mega_eval.server.output_constraints import JsonObject
from mega_eval.server.request_schemas import ChatRequest, RequestBody, StopText, StreamOptions, make_chat_request
from mega_eval.server.request_validation import Many, StrictRequestModel, make_field_error

BLOCK_TYPES = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")
STOP_REASONS: Mapping[str | None, str] = {"length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicContentBlock(StrictRequestModel):
    """Block in the content of a message: text, reasoning, the use of a tool or its result."""

    model_config = ConfigDict(extra="ignore", strict=True)  # ignores fields such as `cache_control` and `citations`
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: JsonObject = {}
    tool_use_id: str = ""
    content: Any = None
    source: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in BLOCK_TYPES:
            raise make_field_error(f"has type {str(kind)[:50]!r}, which is not supported; send text, image, tool_use, tool_result or thinking")  # fmt: skip
        required = {"text": "text", "thinking": "thinking", "tool_use": "name", "tool_result": "tool_use_id"}.get(kind)
        if required is not None and not isinstance(value.get(required), str):
            raise make_field_error(f"of type {kind!r} must have a text in {required!r}")
        source = value.get("source")
        if kind == "image" and not (isinstance(source, dict) and source.get("type") == "base64"):
            raise make_field_error("of type 'image' must have a 'source' of type 'base64'; this server fetches no addresses")  # fmt: skip
        return value

    def to_content_part(self) -> dict[str, Any] | None:
        """Return a block of text or an image as a part of a message of /v1/chat/completions; None for other blocks."""
        if self.type == "image":
            url = f"data:{self.source.get('media_type')};base64,{self.source.get('data')}"
            return {"type": "image_url", "image_url": {"url": url}}
        return {"type": "text", "text": self.text} if self.type == "text" else None

    def read_result(self) -> str:
        """Return the text of a `tool_result` block; an ApiRequestError if its content is not text.

        Raises:
            ApiRequestError: for other content than text.
        """
        content = [] if self.content is None else self.content
        if isinstance(content, str):
            return content
        if not isinstance(content, list) or not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            raise ApiRequestError(400, "the content of a tool_result must be text", param="messages")
        return "".join(part["text"] for part in content)


BlocksField = Annotated[
    Annotated[str, Tag("[text]")] | Annotated[Many[AnthropicContentBlock], Tag("[blocks]")],
    Discriminator(
        lambda value: {str: "[text]", list: "[blocks]"}.get(type(value)),
        custom_error_type="union",
        custom_error_message="must be a text or a list of blocks",
    ),
]


class AnthropicMessage(StrictRequestModel):
    """Message of a conversation in a request to /v1/messages."""

    role: Literal["user", "assistant", "system"]
    content: BlocksField

    def to_chat_messages(self) -> Iterator[dict[str, Any]]:
        """Yield the turn as messages of /v1/chat/completions: results of tools have messages of their own."""
        blocks = (
            [AnthropicContentBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        )
        for block in blocks:
            if block.type == "tool_result":
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.read_result()}
        parts = [part for block in blocks if (part := block.to_content_part()) is not None]
        calls = [
            {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
            for block in blocks if block.type == "tool_use"
        ]  # fmt: skip
        reasoning = "".join(block.thinking for block in blocks)
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        more |= {"reasoning_content": reasoning} if reasoning else {}
        if parts or more or all(block.type != "tool_result" for block in blocks):
            yield {"role": self.role, "content": parts, **more}


class AnthropicTool(StrictRequestModel):
    """Tool that the model may use, in a request to /v1/messages."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "custom"):
            raise make_field_error(f"has type {str(kind)[:50]!r}, which is not supported; send tools with 'input_schema'")  # fmt: skip
        return value

    def to_chat_tool(self) -> dict[str, Any]:
        """Return the tool in the form of /v1/chat/completions."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema, "strict": self.strict}  # fmt: skip
        return {"type": "function", "function": function}


class AnthropicToolChoice(StrictRequestModel):
    """Field `tool_choice` of a request to /v1/messages."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def to_chat_choice(self) -> Any:
        """Return the `tool_choice` of /v1/messages in the form of /v1/chat/completions."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class ThinkingSetting(StrictRequestModel):
    """Field `thinking` of a request to /v1/messages; the model is not held to `budget_tokens`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class AnthropicOutputFormat(StrictRequestModel):
    """Field `output_config.format` of a request to /v1/messages."""

    type: Literal["json_schema"]
    json_schema: Annotated[JsonObject, Field(alias="schema")]


class AnthropicOutputConfig(StrictRequestModel):
    """Field `output_config` of a request to /v1/messages."""

    format: AnthropicOutputFormat | None = None


class CountTokensRequest(RequestBody):
    """Body of a request to /v1/messages/count_tokens: a conversation with tools."""

    messages: Annotated[Many[AnthropicMessage], Field(min_length=1)]
    system: BlocksField | None = None
    tools: Annotated[list[AnthropicTool] | None, Field(max_length=128)] = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingSetting | None = None
    output_config: AnthropicOutputConfig | None = None

    def to_chat_request(self, **more: Any) -> ChatRequest:
        """Return the equivalent request to /v1/chat/completions, with the fields `more`."""
        system = [] if self.system is None else AnthropicMessage(role="system", content=self.system).to_chat_messages()
        turns = [*system, *(message for turn in self.messages for message in turn.to_chat_messages())]
        on = None if self.thinking is None else self.thinking.type != "disabled"
        form = None if self.output_config is None or self.output_config.format is None else self.output_config.format
        return make_chat_request({
            "model": self.model, "messages": turns,
            "tools": [tool.to_chat_tool() for tool in self.tools or ()] or None,
            "tool_choice": self.tool_choice and self.tool_choice.to_chat_choice(),
            "parallel_tool_calls": False if self.tool_choice and self.tool_choice.disable_parallel_tool_use else None,
            "chat_template_kwargs": None if on is None else {"enable_thinking": on, "thinking": on},
            "continue_final_message": turns[-1]["role"] == "assistant" and not turns[-1].get("tool_calls"),
            "response_format": form and {"type": "json_schema", "json_schema": {"schema": form.json_schema}},
            **more,
        })  # fmt: skip


class MessagesRequest(CountTokensRequest):
    """Body of a request to /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    temperature: Annotated[float | None, Field(ge=0, le=100)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0, le=2**31)] = None
    stop_sequences: Annotated[Many[StopText] | None, Field(max_length=16)] = None
    stream: bool | None = False

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.tool_choice is not None and self.tool_choice.type == "tool" and not self.tool_choice.name:
            raise make_field_error("'tool_choice' of type 'tool' requires a 'name'", "tool_choice")
        return self

    def to_chat_request(self, **more: Any) -> ChatRequest:
        """Return the equivalent request to /v1/chat/completions."""
        return super().to_chat_request(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            stop=self.stop_sequences or None, **more,
        )  # fmt: skip


@dataclass
class MessagesAnswerBuilder:
    """Builder of one JSON answer of /v1/messages.

    Attributes:
        model: name of the served model.
        usage: token counts so far.
    """

    model: str
    usage: TokenUsage
    _id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    async def build_answer(self, parts: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        """Collect all generated content and return the complete answer of /v1/messages as a JSON object."""
        whole: ChoiceDelta | None = None
        async for part in parts:
            self.usage.completion += part.count
            if whole is None:
                whole = part
            else:
                whole.append_delta(part)
        assert whole is not None
        content: list[dict[str, Any]] = []
        content += [{"type": "thinking", "thinking": whole.reasoning, "signature": ""}] if whole.reasoning else []
        content += [{"type": "text", "text": whole.text}] if whole.text else []
        content += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _read_arguments(call.arguments)}
            for call in whole.calls
        ]
        return self._format_message(content, whole)

    async def stream_chunks(self, parts: AsyncIterator[ChoiceDelta], _: StreamOptions) -> AsyncIterator[bytes]:
        """Yield the answer as the server-sent events of /v1/messages, such as content_block_delta."""
        yield self._format_event("message_start", message=self._format_message([], None))
        index, opened = -1, ""
        last: ChoiceDelta | None = None
        async for part in parts:
            last = part
            self.usage.completion += part.count
            for key, start, delta in _list_block_deltas(part):
                if key != opened:
                    if opened:
                        yield self._format_event("content_block_stop", index=index)
                    index, opened = index + 1, key
                    yield self._format_event("content_block_start", index=index, content_block=start)
                if any(delta.values()):
                    yield self._format_event("content_block_delta", index=index, delta=delta)
        if opened:
            yield self._format_event("content_block_stop", index=index)
        usage = {"output_tokens": self.usage.completion}
        yield self._format_event("message_delta", delta=_format_stop(last), usage=usage)
        yield self._format_event("message_stop")

    def format_stream_error(self, error: ApiRequestError) -> bytes:
        """Return the server-sent event `error` of an Anthropic Messages stream, as bytes."""
        return self._format_event("error", error=error.format_anthropic_body()["error"])

    def _format_event(self, kind: str, **more: Any) -> bytes:
        """Return an event of the stream."""
        return format_sse_event({"type": kind, **more}, kind)

    def _format_message(self, content: list[dict[str, Any]], last: ChoiceDelta | None) -> dict[str, Any]:
        """Return the message; it is in progress while `last` is None."""
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            **_format_stop(last),
            "usage": {
                "input_tokens": self.usage.prompt, "output_tokens": self.usage.completion,
                "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
            },
        }  # fmt: skip


def _list_block_deltas(part: ChoiceDelta) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Yield the pieces of a part, each with a key of its block, the start of that block, and the piece."""
    if part.reasoning:
        thought = {"type": "thinking", "thinking": "", "signature": ""}
        yield "thinking", thought, {"type": "thinking_delta", "thinking": part.reasoning}
    if part.text:
        yield "text", {"type": "text", "text": ""}, {"type": "text_delta", "text": part.text}
    for call in part.calls:
        start: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield f"tool {call.index}", start, {"type": "input_json_delta", "partial_json": call.arguments}


def _format_stop(last: ChoiceDelta | None) -> dict[str, Any]:
    """Return the fields about the end of an answer; null while it is in progress."""
    if last is None or last.finish is None:
        return {"stop_reason": None, "stop_sequence": None}
    if isinstance(last.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop}
    return {"stop_reason": STOP_REASONS.get(last.finish, "end_turn"), "stop_sequence": None}


def _read_arguments(text: str) -> Any:
    """Return the arguments of a call as an object; cut off ones are in the field `partial_json`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"partial_json": text}
