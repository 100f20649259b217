"""Parts of a conversation that a chat template does not render.

A template is a program, and skips unsupported parts of a message without an error. So each part is removed or changed:
if the text stays the same, the template does not render that part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mega_common.errors import DataError
from mega_data.chat.chat_records import Conversation, Message

RenderTemplate = Callable[[list[Message], list[Any] | None], str | None]
"""Renderer of messages and tools to text, or None if the template fails on them."""

HINT = "remove it from the records, or pass --chat-template FILE with a template that renders it"
# Keys without text, or that are checked separately.
LINKS = ("role", "content", "id", "tool_call_id", "type", "index")
CALLS = ("tool_calls", "function_call")
THOUGHT = "</think>"
SHORT = 16  # characters; a shorter content may occur in a text by chance


def find_unrendered_parts(conversation: Conversation, text: str, render: RenderTemplate) -> tuple[str, ...]:
    """Return notes about keys of messages missing in `text`; DataError if a content, a tool call or the tools are missing.

    Raises:
        DataError: if the content of a message, a tool call or the tools are not in it.
    """
    messages, tools = conversation.messages, conversation.tools
    if tools and render(messages, None) == text:
        raise DataError("the chat template does not render 'tools'", hint=HINT)
    notes: dict[str, None] = {}
    at = 0
    for number, message in enumerate(messages):

        def same(changed: Message, number: int = number) -> bool:
            return render([*messages[:number], changed, *messages[number + 1 :]], tools) == text

        at = _check_content(message, number, text, at, same)
        _check_calls(message, number, same)
        notes |= dict.fromkeys(_unrendered_keys(message, text, same))
    return tuple(notes)


def _check_content(message: Message, number: int, text: str, at: int, same: Callable[[Message], bool]) -> int:
    """Return the position in the text after the content of a message.

    Raises:
        DataError: if the text does not depend on that content.
    """
    content = message.get("content")
    if not isinstance(content, str) or not (bare := content.strip()):
        return at
    position = text.find(bare, at)
    if (position < 0 or len(bare) < SHORT) and same({**message, "content": content + "."}):
        raise DataError(
            f"message {number}: the chat template does not render the content of role {message['role']!r}", hint=HINT
        )
    return at if position < 0 else position + len(bare)


def _check_calls(message: Message, number: int, same: Callable[[Message], bool]) -> None:
    """Reject tool calls that do not affect the text, as a whole, by name or by arguments."""
    for key in CALLS:
        if message.get(key) and same({name: value for name, value in message.items() if name != key}):
            raise DataError(f"message {number}: the chat template does not render {key!r}", hint=HINT)
    value = message.get("tool_calls")
    calls = value if isinstance(value, list) else []
    for index, call in enumerate(calls):
        for part, changed in _vary_call(call):
            others = [*calls[:index], *changed, *calls[index + 1 :]]
            if same({**message, "tool_calls": others}):
                raise DataError(
                    f"message {number}: the chat template does not render {part} tool call {index}", hint=HINT
                )


def _vary_call(call: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield a description of each change to a tool call, and the calls that replace it."""
    yield "the whole", []
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return
    if isinstance(function.get("name"), str):
        yield "the name of", [_replace_function(call, {**function, "name": function["name"] + "_"})]
    if isinstance(arguments := function.get("arguments"), Mapping) and arguments:
        yield "the arguments of", [_replace_function(call, {**function, "arguments": {}})]


def _replace_function(call: Mapping[str, Any], function: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**call, "function": function} if "function" in call else function


def _unrendered_keys(message: Message, text: str, same: Callable[[Message], bool]) -> Iterator[str]:
    """Yield a note for each other key of a message that does not affect the text."""
    for key, value in message.items():
        if key in (*LINKS, *CALLS) or value in ("", [], {}, None, False):
            continue
        if same({name: other for name, other in message.items() if name != key}):
            yield f"have a message with {key!r}, which the chat template does not render"
    content = message.get("content")
    if isinstance(content, str) and THOUGHT in content:
        thought, answer = content.strip().rsplit(THOUGHT, 1)
        if thought.removeprefix("<think>").strip() not in text and answer.strip() in text:
            yield "have a message with reasoning in its content, which the chat template does not render"
