"""Chat templates: rendering of messages to text, and the character spans of answers.

Rendering uses the sandbox and helpers of transformers. If the template marks the model's text by `{% generation %}`,
these spans count in the loss. Otherwise, an answer is the difference between the text of the conversation up to and
including it, and the text of all messages before it with the generation prompt. A template for which these are not
prefixes of the whole text (because it drops earlier reasoning, or puts the system message before the last question) is
rejected.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from mega_common.bounded_parsing import read_json_file, read_utf8_text
from mega_common.errors import DataError
from mega_data.chat.chat_records import Conversation, LossOn, Message
from mega_data.chat.unrendered_parts import find_unrendered_parts
from mega_data.reading.decompression import import_optional_package
from mega_data.reading.documents import LossSpan, RenderedChat

RENDER_SECONDS = 30.0  # per text; a template is a program and may not terminate
RENDER_MEMORY = 1 << 30  # bytes per text, beyond those in use before
MAX_TEXT = 1 << 26  # characters of a rendered text, which the tokenizer encodes in several times that memory
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MEMORY_HINT = "look for repeated or padded texts in the template"
MARK = "mark answers in the template by {% generation %} ... {% endgeneration %}, and pass it as --chat-template FILE"


class ChatTemplateTimeout(DataError):
    """Error for a chat template whose rendering exceeds the time limit."""


class ChatTemplateMemoryError(DataError):
    """Error for a chat template whose rendering exceeds the memory limit, or that renders too long a text."""


class ChatTemplate:
    """Jinja chat template of a tokenizer, which renders conversations as text.

    Attributes:
        marks: whether it marks answers.
        fingerprint: SHA-256 of everything that the text depends on, hex.
    """

    def __init__(self, templates: Mapping[str, str], special: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Create the chat template from Jinja sources by name: `default`, and optionally `tool_use` for conversations
        with tools; `special` tokens and `options` are template variables.
        """
        library = import_optional_package("transformers.utils.chat_template_utils", "rendering chat templates")
        self._render = library.render_jinja_template
        self._templates, self._variables = templates, {**special, **options}
        self.marks = all(GENERATION.search(template) for template in templates.values())
        inputs = json.dumps([dict(templates), self._variables], sort_keys=True)
        self.fingerprint = hashlib.sha256(inputs.encode()).hexdigest()

    def check_syntax(self, source: str) -> None:
        """Raise DataError, naming `source`, if a template is empty, not valid Jinja, or exceeds the time or memory limit.

        Raises:
            DataError: naming the `source` of the templates.
        """
        jinja2 = import_optional_package("jinja2", "rendering chat templates")
        for template in self._templates.values():
            if not template.strip():
                raise DataError(f"{source}: the chat template is empty")
            try:
                with limit_render_time(RENDER_SECONDS), limit_render_memory(RENDER_MEMORY):
                    self._render([[]], chat_template=template, **self._variables)
            except jinja2.TemplateSyntaxError as error:
                reason = f"line {error.lineno}: the chat template is not valid Jinja: {str(error.message).rstrip('.')}"
                raise DataError(f"{source}: {reason}") from None
            except RecursionError:
                raise DataError(f"{source}: the chat template is nested too deeply") from None
            except (ChatTemplateTimeout, ChatTemplateMemoryError) as error:
                raise DataError(f"{source}: {error.message}") from None
            except Exception:  # noqa: BLE001 - many templates fail on a conversation without messages
                continue

    @property
    def depends_on_date(self) -> bool:
        """True if the chat template writes the current date, so that rendered texts change from day to day."""
        return any("strftime_now" in template for template in self._templates.values())

    def render_chat(self, conversation: Conversation, loss_on: LossOn) -> RenderedChat:
        """Return the text of a conversation with the spans that count in the loss.
        The spans are chosen by `loss_on`: all answers, the last one or the whole text.

        Raises:
            DataError: if the template fails, answers cannot be separated from the rest, or no token or every token
                would count in the loss.
        """
        if loss_on == "all":
            text, _ = self._render_messages(conversation, conversation.messages)
            return RenderedChat(text, (LossSpan(0, len(text), 1.0),), self._collect_notes(conversation, text))
        text, spans = (self._find_marked_answers if self.marks else self._find_answers_by_prefix)(conversation)
        spans = [span for span in spans if span.weight and span.begin < span.end]
        if not spans:
            roles = list(dict.fromkeys(message["role"] for message in conversation.messages))
            if any(conversation.weights):
                raise DataError("the chat template renders no text of the answers", hint=MARK)
            if "assistant" in roles:
                raise DataError("no answer counts in the loss", hint="correct weight or train of its messages")
            raise DataError(
                f"no message has the role 'assistant'; the roles are {', '.join(map(repr, roles)) or 'none'}",
                hint="give answers the role assistant, or remove records without an answer",
            )
        if sum(span.end - span.begin for span in spans) == len(text):
            raise DataError(
                "the chat template marks the whole text as an answer, including the questions",
                hint=f"pass --loss-on all, or {MARK}",
            )
        return RenderedChat(text, tuple(spans), self._collect_notes(conversation, text))

    @property
    def renders_tools(self) -> bool:
        """True if there is a separate template for tools, or the default one uses the variable `tools`."""
        return "tool_use" in self._templates or re.search(r"\btools\b", self._templates["default"]) is not None

    @property
    def source(self) -> str:
        """Jinja sources of all templates, joined."""
        return "\n".join(self._templates.values())

    def select_template(self, name: str) -> ChatTemplate:
        """Return a copy of this chat template with only the template called `name`, as the default one.

        Raises:
            DataError: naming the templates there are.
        """
        if name not in self._templates:
            raise DataError(
                f"the tokenizer has no chat template {name!r}", hint=f"use one of: {', '.join(sorted(self._templates))}"
            )
        return ChatTemplate({"default": self._templates[name]}, self._variables, {})

    def find_unused_options(self, options: Mapping[str, Any]) -> list[str]:
        """Return the names in `options` that no template source mentions."""
        return [
            name
            for name in options
            if not any(re.search(rf"\b{re.escape(name)}\b", template) for template in self._templates.values())
        ]

    def get_template_config(self) -> dict[str, str]:
        """Return the default template and its variables (special tokens, options) by key of tokenizer_config.json."""
        return {
            **{name: str(token) for name, token in self._variables.items()},
            "chat_template": self._templates["default"],
        }

    def render_prompt(
        self,
        conversation: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | None = None,
    ) -> str:
        """Return the text of a conversation up to the start of the next answer.

        Args:
            conversation: the conversation; its weights are not used.
            add_generation_prompt: end with the header of the next answer.
            continue_final_message: end inside the last message; default: if there is no header.

        Raises:
            DataError: if the template fails.
        """
        return self._render_messages(
            conversation,
            conversation.messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt
            if continue_final_message is None
            else continue_final_message,
        )[0]

    def _collect_notes(self, conversation: Conversation, text: str) -> tuple[str, ...]:
        """Return notes about the parts of a conversation that are not in its text.

        Raises:
            DataError: as `find_unrendered_parts`.
        """

        def render(messages: list[Message], tools: list[Any] | None) -> str | None:
            try:
                return self._render_messages(replace(conversation, tools=tools), messages, tools_of=conversation)[0]
            except (ChatTemplateTimeout, ChatTemplateMemoryError):
                raise
            except DataError:
                return None

        unused = tuple(
            f"have {name!r} in 'chat_template_kwargs', which the chat template does not use"
            for name in self.find_unused_options(conversation.options)
        )
        return find_unrendered_parts(conversation, text, render) + unused

    def _find_marked_answers(self, conversation: Conversation) -> tuple[str, list[LossSpan]]:
        text, marked = self._render_messages(conversation, conversation.messages, return_assistant_tokens_mask=True)
        answers = [
            weight
            for message, weight in zip(conversation.messages, conversation.weights, strict=True)
            if message["role"] == "assistant"
        ]
        if len(marked) != len(answers):
            if len(set(answers)) > 1:
                raise DataError(
                    f"the chat template marks {len(marked)} texts as answers, but the conversation has {len(answers)}"
                )
            answers = answers[:1] * len(marked)
        return text, [LossSpan(begin, end, weight) for (begin, end), weight in zip(marked, answers, strict=True)]

    def _find_answers_by_prefix(self, conversation: Conversation) -> tuple[str, list[LossSpan]]:
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
                            f"message {number}: the rendered text up to it is not a prefix of the whole conversation, so"
                            " answers cannot be separated from the rest",
                            hint=MARK,
                        )
                spans.append(LossSpan(len(before), len(upto), weight))
        return text, spans

    def _render_messages(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        *,
        tools_of: Conversation | None = None,
        **flags: Any,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render messages by the template that matches the tools of the conversation, or of `tools_of`."""
        name = "tool_use" if (tools_of or conversation).tools and "tool_use" in self._templates else "default"
        variables = {**self._variables, **conversation.options}
        try:
            with limit_render_time(RENDER_SECONDS), limit_render_memory(RENDER_MEMORY):
                texts, marked = self._render(
                    [list(messages)],
                    tools=conversation.tools,
                    chat_template=self._templates[name],
                    **flags,
                    **variables,
                )
        except (ChatTemplateTimeout, ChatTemplateMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program and can raise anything
            raise DataError(f"the chat template fails on the conversation ({error})") from None
        if len(texts[0]) > MAX_TEXT:
            raise ChatTemplateMemoryError(
                f"the chat template renders {len(texts[0]):,} characters, more than {MAX_TEXT:,}", hint=MEMORY_HINT
            )
        return texts[0], marked[0] if marked else []


def read_chat_template(
    tokenizer: Path, file: Path | None = None, options: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """Return the chat template in `file`, or else in the folder of `tokenizer` (tokenizer.json); an error if there is none.
    `options` are passed to each rendering.

    Raises:
        DataError: if there is none, or it cannot be read.
        MissingPackageError: if transformers is not installed.
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
            hint="pass --chat-template FILE with a Jinja template",
        )
    template = ChatTemplate(templates, special, options or {})
    template.check_syntax(str(file or tokenizer.parent))
    return template


@contextlib.contextmanager
def limit_render_time(seconds: float) -> Iterator[None]:
    """Context manager that raises `ChatTemplateTimeout` after `seconds` seconds in its block, in the main thread only.
    Other threads get no signals.

    Raises:
        ChatTemplateTimeout: if the block exceeds the limit.
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
        if fired:  # jinja may have replaced the error: its traces fail at a line without a number
            raise late from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def limit_render_memory(size: int) -> Iterator[None]:
    """Context manager that limits its block to `size` bytes (`ChatTemplateMemoryError`), in Linux's main thread only.
    The bytes are counted from the start of the block; the limit applies to the process's address space.

    Raises:
        ChatTemplateMemoryError: if the block exceeds the limit.
    """
    pages = Path("/proc/self/statm")
    if threading.current_thread() is not threading.main_thread() or not pages.is_file():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(pages.read_text().split()[0]) * resource.getpagesize() + size
    if before[0] != resource.RLIM_INFINITY and before[0] < limit:
        limit = before[0]
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    except MemoryError:
        text = f"the chat template takes more than {size >> 20:,} MiB of memory"
        raise ChatTemplateMemoryError(text, hint=MEMORY_HINT) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _load_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    paths = {"default": folder / "chat_template.jinja"}
    paths |= {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    files = {name: read_utf8_text(path, DataError) for name, path in paths.items() if path.is_file()}
    entry = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template") or {}
    if isinstance(entry, list):
        entry = {template["name"]: template["template"] for template in entry}
    return {**({"default": entry} if isinstance(entry, str) else entry), **files}


def _parse_token(value: Any) -> str | None:
    """Return a special token that is stored as a text, or as an object with its text."""
    token = value.get("content") if isinstance(value, dict) else value
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    raw = read_json_file(path, DataError) if path.is_file() else {}
    return raw if isinstance(raw, dict) else {}
