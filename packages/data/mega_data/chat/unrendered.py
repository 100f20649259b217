"""Search for parts of a conversation that a chat template leaves out of its text.

A template is a program, and one that does not know a part of a message skips it without an error. So each part is taken
away or changed: where the text stays the same, the template does not render that part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mega_common.errors import DataError
from mega_data.chat.records import Conversation, Message

Render = Callable[[list[Message], list[Any] | None], str | None]
"""Text of messages and tools, None when the template refuses them."""

HINT = "remove it from the records, or give a template that renders it: --chat-template FILE"
# Keys that carry no text, or that are checked on their own.
LINKS = ("role", "content", "id", "tool_call_id", "type", "index")
CALLS = ("tool_calls", "function_call")
THOUGHT = "</think>"
SHORT = 16  # characters: a shorter content may be in a text without being rendered


def find_unrendered(conversation: Conversation, text: str, render: Render) -> tuple[str, ...]:
    """Return notes about the parts of a conversation that are not in its `text`.

    Raises:
        DataError: when the content of a message, a tool call or the tools are not.
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
    """Return the place in the text behind the content of a message.

    Raises:
        DataError: when the text does not depend on that content.
    """
    content = message.get("content")
    if not isinstance(content, str) or not (bare := content.strip()):
        return at
    found = text.find(bare, at)
    if (found < 0 or len(bare) < SHORT) and same({**message, "content": content + "."}):
        raise DataError(
            f"message {number}: the chat template does not render the content of role {message['role']!r}", hint=HINT
        )
    return at if found < 0 else found + len(bare)


def _check_calls(message: Message, number: int, same: Callable[[Message], bool]) -> None:
    """Refuse tool calls that the text does not depend on, as wholes, by their names or by their arguments."""
    for key in CALLS:
        if message.get(key) and same({name: value for name, value in message.items() if name != key}):
            raise DataError(f"message {number}: the chat template does not render {key!r}", hint=HINT)
    found = message.get("tool_calls")
    calls = found if isinstance(found, list) else []
    for index, call in enumerate(calls):
        for part, changed in _changed_calls(call):
            others = [*calls[:index], *changed, *calls[index + 1 :]]
            if same({**message, "tool_calls": others}):
                raise DataError(
                    f"message {number}: the chat template does not render {part} tool call {index}", hint=HINT
                )


def _changed_calls(call: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield what is changed in a tool call, and the calls in its place."""
    yield "the whole", []
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return
    if isinstance(function.get("name"), str):
        yield "the name of", [_with_function(call, {**function, "name": function["name"] + "_"})]
    if isinstance(arguments := function.get("arguments"), Mapping) and arguments:
        yield "the arguments of", [_with_function(call, {**function, "arguments": {}})]


def _with_function(call: Mapping[str, Any], function: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**call, "function": function} if "function" in call else function


def _unrendered_keys(message: Message, text: str, same: Callable[[Message], bool]) -> Iterator[str]:
    """Yield a note for each other key of a message that the text does not depend on."""
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
