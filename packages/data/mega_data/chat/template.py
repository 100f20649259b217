"""A chat template: messages to text, and which characters of it are answers.

Rendering is transformers' own, sandbox and helpers included. Where the template marks what a model says by
`{% generation %}`, that is what counts. Else an answer is what the text of the conversation up to and with it has more
than the text of all before it with the prompt for an answer; a template whose texts do not begin alike (one that drops
earlier reasoning, or puts the system message before the last question) is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mega_common.errors import DataError
from mega_common.parsing import parse_json
from mega_data.chat.records import Conversation, LossOn, Message
from mega_data.chat.unrendered import find_unrendered
from mega_data.reading.unpack import package

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK = "mark answers in the template by {% generation %} ... {% endgeneration %}, and give it as --chat-template FILE"


class Span(NamedTuple):
    """Characters [begin, end) of a text and their weight in the loss."""

    begin: int
    end: int
    weight: float


class Rendered(NamedTuple):
    """The text of a conversation, what of it counts in the loss, and notes about what the template left out."""

    text: str
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()


class ChatTemplate:
    """The template of a tokenizer.

    Attributes:
        marks: whether it marks answers.
        fingerprint: SHA-256 of all that decides about the text, hex.
    """

    def __init__(self, templates: Mapping[str, str], special: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """`templates` by name: `default`, and `tool_use` for conversations with tools where that is there."""
        self._render = package("transformers.utils.chat_template_utils", "chat templates").render_jinja_template
        self._templates, self._given = templates, {**special, **options}
        self.marks = all(GENERATION.search(template) for template in templates.values())
        told = json.dumps([dict(templates), self._given], sort_keys=True)
        self.fingerprint = hashlib.sha256(told.encode()).hexdigest()

    @property
    def dated(self) -> bool:
        """Whether its texts depend on the day."""
        return any("strftime_now" in template for template in self._templates.values())

    def render(self, conversation: Conversation, loss_on: LossOn) -> Rendered:
        """The text of a conversation.

        Raises:
            DataError: when the template refuses it, answers cannot be told from the rest, or nothing or everything
                would count.
        """
        if loss_on == "all":
            text, _ = self._text(conversation, conversation.messages)
            return Rendered(text, (Span(0, len(text), 1.0),), self._notes(conversation, text))
        text, spans = (self._by_marks if self.marks else self._by_prefixes)(conversation)
        spans = [span for span in spans if span.weight and span.begin < span.end]
        if not spans:
            raise DataError("no answer that counts in the loss: no message of an assistant, or none with a weight")
        if sum(span.end - span.begin for span in spans) == len(text):
            raise DataError("all of the text is an answer, the questions too", hint=f"--loss-on all says so, or {MARK}")
        return Rendered(text, tuple(spans), self._notes(conversation, text))

    @property
    def renders_tools(self) -> bool:
        """Whether the template has a place for tools."""
        return "tool_use" in self._templates or re.search(r"\btools\b", self._templates["default"]) is not None

    def find_unused(self, options: Mapping[str, Any]) -> list[str]:
        """Return the names of options that no template mentions."""
        return [
            name
            for name in options
            if not any(re.search(rf"\b{re.escape(name)}\b", template) for template in self._templates.values())
        ]

    def facts(self) -> dict[str, str]:
        """Return the default template and the special tokens, by the names of tokenizer_config.json."""
        return {
            **{name: str(token) for name, token in self._given.items()},
            "chat_template": self._templates["default"],
        }

    def prompt(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | None = None,
    ) -> str:
        """Return the text of a conversation up to where the next answer begins, or goes on in its last message.

        Args:
            conversation: whose weights are not used.
            add_generation_prompt: end with the header of the next answer.
            continue_final_message: end inside of the last message; default: without the header.

        Raises:
            DataError: when the template refuses it.
        """
        goes_on = not add_generation_prompt if continue_final_message is None else continue_final_message
        how: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "continue_final_message": goes_on}
        return self._text(conversation, conversation.messages, **how)[0]

    def _notes(self, conversation: Conversation, text: str) -> tuple[str, ...]:
        """Return notes about the parts of a conversation that are not in its text.

        Raises:
            DataError: as `find_unrendered`.
        """

        def render(messages: list[Message], tools: list[Any] | None) -> str | None:
            try:
                return self._text(replace(conversation, tools=tools), messages, tools_of=conversation)[0]
            except DataError:
                return None

        unused = tuple(
            f"have {name!r} in 'chat_template_kwargs', which the chat template does not use"
            for name in self.find_unused(conversation.options)
        )
        return find_unrendered(conversation, text, render) + unused

    def _by_marks(self, conversation: Conversation) -> tuple[str, list[Span]]:
        text, marked = self._text(conversation, conversation.messages, return_assistant_tokens_mask=True)
        answers = [
            weight
            for message, weight in zip(conversation.messages, conversation.weights, strict=True)
            if message["role"] == "assistant"
        ]
        if len(marked) != len(answers):
            if len(set(answers)) > 1:
                raise DataError(f"the template marks {len(marked)} texts as answers, and there are {len(answers)}")
            answers = answers[:1] * len(marked)
        return text, [Span(begin, end, weight) for (begin, end), weight in zip(marked, answers, strict=True)]

    def _by_prefixes(self, conversation: Conversation) -> tuple[str, list[Span]]:
        messages = conversation.messages
        text, _ = self._text(conversation, messages)
        spans = []
        for number, weight in enumerate(conversation.weights):
            if weight:
                before, _ = self._text(conversation, messages[:number], add_generation_prompt=True)
                upto, _ = self._text(conversation, messages[: number + 1])
                for part in (before, upto):
                    if not text.startswith(part):
                        raise DataError(
                            f"message {number}: the text up to it is not what the whole conversation's begins with, so"
                            " that the template does not tell answers from the rest",
                            hint=MARK,
                        )
                spans.append(Span(len(before), len(upto), weight))
        return text, spans

    def _text(
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
            texts, marked = self._render(
                [list(messages)], tools=conversation.tools, chat_template=self._templates[name], **how, **given
            )
        except Exception as error:  # noqa: BLE001 - a template is a program: it raises what it likes
            raise DataError(f"the chat template fails on it ({error})") from None
        return texts[0], marked[0] if marked else []


def load_template(tokenizer: Path, file: Path | None = None, options: Mapping[str, Any] | None = None) -> ChatTemplate:
    """The chat template beside a `tokenizer.json`, or that of a file; `options` are given to it each time.

    Raises:
        DataError: when there is none, or it cannot be read.
        MissingPackageError: without transformers.
    """
    config = _json(tokenizer.parent / "tokenizer_config.json")
    names = {**config, **_json(tokenizer.parent / "special_tokens_map.json")}
    special = {name: token for name, value in names.items() if name.endswith("_token") and (token := _token(value))}
    templates = _templates(tokenizer.parent, config) if file is None else {"default": _read(file)}
    if "default" not in templates:
        raise DataError(
            f"{tokenizer.parent}: the tokenizer has no chat template",
            hint="give one, in Jinja: --chat-template FILE",
        )
    return ChatTemplate(templates, special, options or {})


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    found = {"default": folder / "chat_template.jinja"}
    found |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    files = {name: _read(path) for name, path in found.items() if path.is_file()}
    said = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(said, list):
        said = {one["name"]: one["template"] for one in said}
    return {**({"default": said} if isinstance(said, str) else said), **files}


def _token(value: Any) -> str | None:
    """A special token as the files have it: a text, or an object with its text."""
    token = value.get("content") if isinstance(value, dict) else value
    return token if isinstance(token, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        raw = parse_json(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    return raw if isinstance(raw, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
