"""Tools that a chat may call, in its request and in its prompt.

A chat template with support for tools renders them; for other templates the system message describes them. If a call is
required, the answer is constrained to the JSON of a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mega_eval.server.request_validation import StrictRequestModel, expect_union

FOREIGN = re.compile(
    r"\[TOOL_CALLS\]|<｜tool|<\|channel\|>|<function=|<\|tool_calls_section_begin\|>|<\|START_ACTION\|>"
)
"""Markers of templates whose call format is not supported."""

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
    expect_union('"none", "auto", "required" or {"type": "function", "function": {"name": NAME}}'),
]


def make_call_schema(tools: Sequence[ChatTool]) -> str:
    """Return the JSON schema, as text, of a call {"name", "arguments"} of one of `tools`."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": tool.function.parameters or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]  # fmt: skip
    schema = calls[0] if len(calls) == 1 else {"type": "object", "anyOf": calls}
    return json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})  # llguidance: JSON without spaces


def describe_tools(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat messages with a description of the tools appended to the system message.
    It is for chat templates that do not render tools.
    """
    text = DESCRIPTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if messages[0]["role"] == "system":
        first, *rest = messages
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]


def parse_call_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a chat message in which the arguments of each tool call are a JSON object instead of JSON text."""
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
