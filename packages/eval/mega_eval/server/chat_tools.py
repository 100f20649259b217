"""Tools that a chat may call, in its request and in its prompt.

A chat template with support for tools renders them; for other templates the system message describes them, and calls and
their results become text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mega_eval.server.request_validation import StrictRequestModel, make_union_validator

DESCRIPTION = """You can call functions. Their JSON schemas are, one a line:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as a JSON object:
<tool_call>
{{"name": NAME, "arguments": ARGUMENTS}}
</tool_call>"""


class ToolFunction(StrictRequestModel):
    """Function that the model may call: field `function` of an item of a chat request's `tools`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(StrictRequestModel):
    """Item of the list `tools` of a chat request: a tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(StrictRequestModel):
    """Name of the function that a chat request's `tool_choice` requires."""

    name: str


class NamedToolChoice(StrictRequestModel):
    """Value of a chat request's `tool_choice` that requires a call of one named function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice,
    Field(),
    make_union_validator('"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'),
]


def add_tools_to_messages(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages with `tools` described in the system message, for a template that does not render them.
    Calls and their results become text.
    """
    turns = [_write_calls(message) for message in messages]
    if not tools:
        return turns
    text = DESCRIPTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if turns[0]["role"] == "system":
        first, *rest = turns
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *turns]


def _write_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Return a chat message with its calls, or the result of a call, as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return message
    texts = [f"<tool_call>\n{json.dumps(call.get('function'), ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, [message["content"], *texts]))
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": content}


def decode_tool_call_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a chat message whose tool-call arguments are parsed from JSON text, or unchanged where not valid JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parse_arguments(call) for call in calls]}


def _parse_arguments(call: Any) -> Any:
    """Return one call with its arguments as an object, or unchanged if they are not JSON."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return {**call, "function": {**call["function"], "arguments": arguments}}


def encode_tool_call_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a chat message in which the arguments of each tool call are JSON text, as some chat templates expect."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_write_arguments(call) for call in calls]}


def _write_arguments(call: Any) -> Any:
    """Return one call with its arguments as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    text = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
