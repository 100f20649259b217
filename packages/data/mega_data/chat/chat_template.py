"""Chat templates: rendering of messages to text, the character spans of answers, and checks for parts left out.

Rendering is transformers' own, sandbox and helpers included. Where the template marks what a model says by
`{% generation %}`, that is what counts. Else an answer is what the text of the conversation up to and with it has more
than the text of all before it with the prompt for an answer; a template whose texts do not begin alike (one that drops
earlier reasoning, or puts the system message before the last question) is refused.

A template is a program, and one that does not know a part of a message skips it without an error. So each part is taken
away or changed: where the text stays the same, the template does not render that part.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mega_common.bounded_parsing import read_json_file, read_utf8_text
from mega_common.errors import DataError
from mega_data.chat.chat_records import Conversation, LossOn, Message
from mega_data.reading.decompression import import_optional

RenderTemplate = Callable[[list[Message], list[Any] | None], str | None]
"""Text of messages and tools, None when the template refuses them."""

HINT = "remove it from the records, or give a template that renders it: --chat-template FILE"
# Keys that carry no text, or that are checked on their own.
LINKS = ("role", "content", "id", "tool_call_id", "type", "index")
CALLS = ("tool_calls", "function_call")
THOUGHT = "</think>"
SHORT = 16  # characters: a shorter content may be in a text without being rendered


def find_unrendered_parts(conversation: Conversation, text: str, render: RenderTemplate) -> tuple[str, ...]:
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
    """Return the position in the text behind the content of a message.

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
    """Reject tool calls that do not affect the text, as a whole, by name or by arguments."""
    for key in CALLS:
        if message.get(key) and same({name: value for name, value in message.items() if name != key}):
            raise DataError(f"message {number}: the chat template does not render {key!r}", hint=HINT)
    found = message.get("tool_calls")
    calls = found if isinstance(found, list) else []
    for index, call in enumerate(calls):
        for part, changed in _vary_call(call):
            others = [*calls[:index], *changed, *calls[index + 1 :]]
            if same({**message, "tool_calls": others}):
                raise DataError(
                    f"message {number}: the chat template does not render {part} tool call {index}", hint=HINT
                )


def _vary_call(call: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield a description of each change to a tool call, and the calls in its place."""
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


RENDER_SECONDS = 30.0  # for one text; a template is a program, which need not end
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK = "mark answers in the template by {% generation %} ... {% endgeneration %}, and give it as --chat-template FILE"


class ChatTemplateTimeout(DataError):
    """Chat template that exceeds its time limit."""


class AnswerSpan(NamedTuple):
    """Characters [begin, end) of a text and their weight in the loss."""

    begin: int
    end: int
    weight: float


class RenderedChat(NamedTuple):
    """Text of a conversation, its spans that count in the loss, and notes about parts that the template left out."""

    text: str
    spans: tuple[AnswerSpan, ...]
    notes: tuple[str, ...] = ()


class ChatTemplate:
    """Chat template of a tokenizer.

    Attributes:
        marks: whether it marks answers.
        fingerprint: SHA-256 of all that decides about the text, hex.
    """

    def __init__(self, templates: Mapping[str, str], special: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Create the template from `templates` by name: `default`, and optionally `tool_use` for conversations with
        tools.
        """
        self._render = import_optional("transformers.utils.chat_template_utils", "chat templates").render_jinja_template
        self._templates, self._given = templates, {**special, **options}
        self.marks = all(GENERATION.search(template) for template in templates.values())
        told = json.dumps([dict(templates), self._given], sort_keys=True)
        self.fingerprint = hashlib.sha256(told.encode()).hexdigest()

    def check_syntax(self, source: str) -> None:
        """Check that the templates are valid Jinja, by rendering a conversation without messages.

        Raises:
            DataError: naming the `source` of the templates.
        """
        jinja2 = import_optional("jinja2", "chat templates")
        for template in self._templates.values():
            if not template.strip():
                raise DataError(f"{source}: the chat template is empty")
            try:
                with limit_time(RENDER_SECONDS):
                    self._render([[]], chat_template=template, **self._given)
            except jinja2.TemplateSyntaxError as error:
                reason = f"the chat template is not valid Jinja ({error.message}, line {error.lineno})"
                raise DataError(f"{source}: {reason}") from None
            except RecursionError:
                raise DataError(f"{source}: the chat template is nested too deeply") from None
            except ChatTemplateTimeout as error:
                raise DataError(f"{source}: {error.message}") from None
            except Exception:  # noqa: BLE001 - many templates refuse a conversation without messages
                continue

    @property
    def depends_on_date(self) -> bool:
        """True if the rendered texts depend on the date."""
        return any("strftime_now" in template for template in self._templates.values())

    def render_chat(self, conversation: Conversation, loss_on: LossOn) -> RenderedChat:
        """Return the text of a conversation with its answer spans.

        Raises:
            DataError: when the template refuses it, answers cannot be told from the rest, or nothing or everything
                would count.
        """
        if loss_on == "all":
            text, _ = self._render_messages(conversation, conversation.messages)
            return RenderedChat(text, (AnswerSpan(0, len(text), 1.0),), self._collect_notes(conversation, text))
        text, spans = (self._find_marked_answers if self.marks else self._find_answers_by_prefix)(conversation)
        spans = [span for span in spans if span.weight and span.begin < span.end]
        if not spans:
            raise DataError("no answer that counts in the loss: no message of an assistant, or none with a weight")
        if sum(span.end - span.begin for span in spans) == len(text):
            raise DataError("all of the text is an answer, the questions too", hint=f"--loss-on all says so, or {MARK}")
        return RenderedChat(text, tuple(spans), self._collect_notes(conversation, text))

    @property
    def renders_tools(self) -> bool:
        """True if the template renders tools."""
        return "tool_use" in self._templates or re.search(r"\btools\b", self._templates["default"]) is not None

    def find_unused_options(self, options: Mapping[str, Any]) -> list[str]:
        """Return the names of options that no template mentions."""
        return [
            name
            for name in options
            if not any(re.search(rf"\b{re.escape(name)}\b", template) for template in self._templates.values())
        ]

    def get_template_config(self) -> dict[str, str]:
        """Return the default template and the special tokens, by the names of tokenizer_config.json."""
        return {
            **{name: str(token) for name, token in self._given.items()},
            "chat_template": self._templates["default"],
        }

    def render_prompt(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | None = None,
    ) -> str:
        """Return the text of a conversation up to the start of the next answer, or within its last message.

        Args:
            conversation: whose weights are not used.
            add_generation_prompt: end with the header of the next answer.
            continue_final_message: end inside of the last message; default: without the header.

        Raises:
            DataError: when the template refuses it.
        """
        goes_on = not add_generation_prompt if continue_final_message is None else continue_final_message
        how: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "continue_final_message": goes_on}
        return self._render_messages(conversation, conversation.messages, **how)[0]

    def _collect_notes(self, conversation: Conversation, text: str) -> tuple[str, ...]:
        """Return notes about the parts of a conversation that are not in its text.

        Raises:
            DataError: as `find_unrendered_parts`.
        """

        def render(messages: list[Message], tools: list[Any] | None) -> str | None:
            try:
                return self._render_messages(replace(conversation, tools=tools), messages, tools_of=conversation)[0]
            except ChatTemplateTimeout:
                raise
            except DataError:
                return None

        unused = tuple(
            f"have {name!r} in 'chat_template_kwargs', which the chat template does not use"
            for name in self.find_unused_options(conversation.options)
        )
        return find_unrendered_parts(conversation, text, render) + unused

    def _find_marked_answers(self, conversation: Conversation) -> tuple[str, list[AnswerSpan]]:
        text, marked = self._render_messages(conversation, conversation.messages, return_assistant_tokens_mask=True)
        answers = [
            weight
            for message, weight in zip(conversation.messages, conversation.weights, strict=True)
            if message["role"] == "assistant"
        ]
        if len(marked) != len(answers):
            if len(set(answers)) > 1:
                raise DataError(f"the template marks {len(marked)} texts as answers, and there are {len(answers)}")
            answers = answers[:1] * len(marked)
        return text, [AnswerSpan(begin, end, weight) for (begin, end), weight in zip(marked, answers, strict=True)]

    def _find_answers_by_prefix(self, conversation: Conversation) -> tuple[str, list[AnswerSpan]]:
        messages = conversation.messages
        text, _ = self._render_messages(conversation, messages)
        spans = []
        for number, weight in enumerate(conversation.weights):
            if weight:
                before, _ = self._render_messages(conversation, messages[:number], add_generation_prompt=True)
                upto, _ = self._render_messages(conversation, messages[: number + 1])
                for part in (before, upto):
                    if not text.startswith(part):
                        raise DataError(
                            f"message {number}: the text up to it is not what the whole conversation's begins with, so"
                            " that the template does not tell answers from the rest",
                            hint=MARK,
                        )
                spans.append(AnswerSpan(len(before), len(upto), weight))
        return text, spans

    def _render_messages(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        *,
        tools_of: Conversation | None = None,
        **how: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render messages by the template that suits the tools of the conversation, or of `tools_of`."""
        name = "tool_use" if (tools_of or conversation).tools and "tool_use" in self._templates else "default"
        given = {**self._given, **conversation.options}
        try:
            with limit_time(RENDER_SECONDS):
                texts, marked = self._render(
                    [list(messages)], tools=conversation.tools, chat_template=self._templates[name], **how, **given
                )
        except ChatTemplateTimeout:
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program: it raises what it likes
            raise DataError(f"the chat template fails on it ({error})") from None
        return texts[0], marked[0] if marked else []


def read_chat_template(
    tokenizer: Path, file: Path | None = None, options: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """Return the chat template beside a `tokenizer.json`, or that of a file; `options` are passed to each rendering.

    Raises:
        DataError: when there is none, or it cannot be read.
        MissingPackageError: without transformers.
    """
    config = _read_json(tokenizer.parent / "tokenizer_config.json")
    names = {**config, **_read_json(tokenizer.parent / "special_tokens_map.json")}
    special = {
        name: token for name, value in names.items() if name.endswith("_token") and (token := _parse_token(value))
    }
    templates = (
        _load_templates(tokenizer.parent, config) if file is None else {"default": read_utf8_text(file, DataError)}
    )
    if "default" not in templates:
        raise DataError(
            f"{tokenizer.parent}: the tokenizer has no chat template",
            hint="give one, in Jinja: --chat-template FILE",
        )
    template = ChatTemplate(templates, special, options or {})
    template.check_syntax(str(file or tokenizer.parent))
    return template


@contextlib.contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """End the block after a number of seconds; works in the main thread of a process, the only one that gets signals.

    Raises:
        SlowTemplateError: when it does not end by itself.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    late = ChatTemplateTimeout(
        f"the chat template takes more than {seconds:g} seconds", hint="look for endless loops in the template"
    )
    fired: list[int] = []

    def raise_timeout(number: int, frame: FrameType | None) -> None:
        fired.append(number)
        raise late

    handler = signal.signal(signal.SIGALRM, raise_timeout)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except Exception:
        if fired:  # whatever jinja made of it: its own traces fail where a line has no number
            raise late from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)


def _load_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    found = {"default": folder / "chat_template.jinja"}
    found |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    files = {name: read_utf8_text(path, DataError) for name, path in found.items() if path.is_file()}
    said = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(said, list):
        said = {one["name"]: one["template"] for one in said}
    return {**({"default": said} if isinstance(said, str) else said), **files}


def _parse_token(value: Any) -> str | None:
    """Return a special token that is stored as a text, or as an object with its text."""
    token = value.get("content") if isinstance(value, dict) else value
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    raw = read_json_file(path, DataError) if path.is_file() else {}
    return raw if isinstance(raw, dict) else {}
