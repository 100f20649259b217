"""Formats in which model families write tool calls and reasoning: detection by the chat template, parsing and grammars.

Each parser reads a `StreamingTextReader` and yields `ParsedAnswerDelta`s. Text that looks like a call but names no tool of the request stays
content.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import string
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mega_eval.server.growing_text import Deltas, ParsedAnswerDelta, StreamingTextReader

Tools = Mapping[str, Mapping[str, Any]]  # JSON schema of the arguments of each tool, by name

NAME = r"[\w.-]{1,64}"
JSON_HEAD = re.compile(rf'\s{{0,99}}\{{\s{{0,99}}"name"\s{{0,99}}:\s{{0,99}}"({NAME})"\s{{0,99}},\s{{0,99}}"(?:arguments|parameters)"\s{{0,99}}:\s{{0,99}}(?=\{{)')  # fmt: skip


def parse_json_list_of_tool_calls(text: str, tools: Tools) -> list[ParsedAnswerDelta] | None:
    """Return the deltas of JSON text that is a call of one of `tools` or a list of such calls; None if it is anything else.
    A call has a name and arguments.
    """
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = read if isinstance(read, list) else [read]
    if not calls or not all(isinstance(call, dict) and call.get("name") in tools for call in calls):
        return None
    found = []
    for call in calls:
        arguments = call.get("arguments", call.get("parameters", {}))
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        found += [ParsedAnswerDelta("call", call["name"]), ParsedAnswerDelta("arguments", shown)]
    return found


def _read_json_call(text: StreamingTextReader, tools: Tools) -> Generator[ParsedAnswerDelta | None, None, str | None]:
    """Read the JSON object of one call; return its text if it is none, else None."""

    def match_head(unread: str) -> re.Match[str] | None:
        found = JSON_HEAD.match(unread)
        return found if found is not None and found[1] in tools else None

    raw = yield from text.take_json(match_head)
    if not isinstance(raw, str):
        text.read(raw.end())
        yield ParsedAnswerDelta("call", raw[1])
        yield from text.stream_json()
        text.unread = "{" + text.unread  # so that the rest of the object ends as an object
        yield from text.take_json()
        return None
    if (calls := parse_json_list_of_tool_calls(raw, tools)) is None:
        return raw
    yield from calls
    return None


def _parse_bare_json(text: StreamingTextReader, tools: Tools) -> Deltas:
    """Parse the JSON of calls, separated by semicolons or commas, at the beginning of an answer (Llama)."""
    yield from text.skip_mark("<|python_tag|>")
    begin = ""
    if (yield from text.peek_past_whitespace()).startswith("["):
        items = str((yield from text.take_json()))
        calls = parse_json_list_of_tool_calls(items, tools)
        yield from [ParsedAnswerDelta("content", items)] if calls is None else calls
        return
    while text.unread.lstrip().startswith("{"):
        raw = yield from _read_json_call(text, tools)
        if raw is not None:
            yield ParsedAnswerDelta("content", begin + raw)
            return
        if not (yield from text.skip_whitespace()):
            return
        begin = text.read(1) if text.unread[0] in ";," else ""
        yield from text.skip_whitespace()


def parse_json_tool_calls(text: StreamingTextReader, tools: Tools) -> Deltas:
    """Yield the deltas of an answer that is the JSON of tool calls (Llama 3), or is content."""
    yield from _parse_bare_json(text, tools)
    yield from text.stream_until("content")


def parse_hermes_tool_calls(text: StreamingTextReader, tools: Tools) -> Deltas:
    """Yield the deltas of an answer with JSON calls in `<tool_call>` tags (Hermes, Qwen), or that is the JSON of calls."""
    yield from _parse_bare_json(text, tools)
    while (yield from text.stream_until("content", "<tool_call>")):
        yield from text.skip_whitespace()
        if not text.unread.startswith("{"):
            yield ParsedAnswerDelta("content", "<tool_call>")
            continue
        raw = yield from _read_json_call(text, tools)
        if raw is not None:
            yield ParsedAnswerDelta("content", "<tool_call>" + raw)
            continue
        yield from text.take_until("</tool_call>")


def parse_mistral_tool_calls(text: StreamingTextReader, tools: Tools) -> Deltas:
    """Yield the deltas of an answer with `[TOOL_CALLS]` and a JSON list of calls, or `NAME[ARGS]{...}` each (Mistral)."""
    while (yield from text.stream_until("content", "[TOOL_CALLS]")):
        yield from text.skip_whitespace()
        if text.unread.startswith("["):
            text.read(1)
            while (yield from text.skip_whitespace()) and text.unread.startswith("{"):
                raw = yield from _read_json_call(text, tools)
                yield from [] if raw is None else [ParsedAnswerDelta("content", raw)]
                yield from text.skip_whitespace()
                yield from text.skip_mark(",", "]")
            continue
        head = re.compile(rf"({NAME})(?:\[CALL_ID\](\w{{1,64}}))?(?:\[ARGS\])?\s*(?=\{{)")
        found = yield from text.wait_for_match(head)
        if found is None or found[1] not in tools:
            yield ParsedAnswerDelta("content", "[TOOL_CALLS]")
            continue
        text.read(found.end())
        yield ParsedAnswerDelta("call", found[1], found[2])
        yield from text.stream_json()


def parse_deepseek_tool_calls(text: StreamingTextReader, tools: Tools) -> Deltas:
    """Yield the deltas of an answer with calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>` (DeepSeek).
    They are `NAME<｜tool▁sep｜>{...}` (V3.1), or `function<｜tool▁sep｜>NAME` and JSON in a code block (V3, R1).
    """
    begins = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"
    while mark := (yield from text.stream_until("content", *begins)):
        while mark is not None and mark != "<｜tool▁calls▁end｜>":
            if mark == begins[1]:
                head, _ = yield from text.take_until("<｜tool▁sep｜>")
                if head.strip() == "function":
                    head, _ = yield from text.take_until("```json")
                yield from text.skip_whitespace()
                yield from _stream_named_call(text, head.strip(), tools, begins[1] + head)
            _, mark = yield from text.take_until(begins[1], "<｜tool▁calls▁end｜>")


def parse_kimi_tool_calls(text: StreamingTextReader, tools: Tools) -> Deltas:
    """Yield the deltas of an answer with `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}` (Kimi K2)."""
    begin, end = "<|tool_call_begin|>", "<|tool_calls_section_end|>"
    while mark := (yield from text.stream_until("content", "<|tool_calls_section_begin|>", begin)):
        while mark is not None and mark != end:
            if mark == begin:
                head, _ = yield from text.take_until("<|tool_call_argument_begin|>")
                call_id = head.strip()
                name = call_id.removeprefix("functions.").rpartition(":")[0]
                yield from text.skip_whitespace()
                yield from _stream_named_call(text, name, tools, begin + head, call_id)
            _, mark = yield from text.take_until(begin, end)


def _stream_named_call(
    text: StreamingTextReader, name: str, tools: Tools, raw: str, call_id: str | None = None
) -> Deltas:
    """Yield a call whose arguments follow as JSON, or `raw`, the text before them, as content if `name` is not a tool."""
    if name in tools and text.unread.startswith("{"):
        yield ParsedAnswerDelta("call", name, call_id)
        yield from text.stream_json()
    else:
        yield ParsedAnswerDelta("content", raw)


def parse_glm_tool_calls(text: StreamingTextReader, tools: Tools) -> Deltas:
    """Yield the deltas of an answer with `<tool_call>NAME`, `<arg_key>` and `<arg_value>` (GLM 4.5)."""
    while (yield from text.stream_until("content", "<tool_call>")):
        head, mark = yield from text.take_until("<arg_key>", "</tool_call>")
        if (name := head.strip()) not in tools:
            yield ParsedAnswerDelta("content", f"<tool_call>{head}{mark or ''}")
            continue
        yield ParsedAnswerDelta("call", name)
        count = 0
        while mark == "<arg_key>":
            key, _ = yield from text.take_until("</arg_key>")
            _, opened = yield from text.take_until("<arg_value>", "<arg_key>", "</tool_call>")
            if opened != "<arg_value>":
                mark = opened
                continue
            value, _ = yield from text.take_until("</arg_value>")
            yield _format_argument(count, key.strip(), value, tools[name])
            count += 1
            _, mark = yield from text.take_until("<arg_key>", "</tool_call>")
        yield ParsedAnswerDelta("arguments", "}" if count else "{}")


def parse_qwen_coder_tool_calls(text: StreamingTextReader, tools: Tools) -> Deltas:
    """Yield the deltas of an answer with `<function=NAME>` and `<parameter=KEY>` (Qwen3-Coder)."""
    while mark := (yield from text.stream_until("content", "<tool_call>", "<function=")):
        if mark == "<tool_call>":
            yield from text.skip_whitespace()
            if not (yield from text.skip_mark("<function=")):
                yield ParsedAnswerDelta("content", "<tool_call>")
                continue
        name, _ = yield from text.take_until(">")
        if name not in tools:
            yield ParsedAnswerDelta("content", f"<function={name}>")
            continue
        yield ParsedAnswerDelta("call", name)
        count = 0
        while (yield from text.take_until("<parameter=", "</function>"))[1] == "<parameter=":
            key, _ = yield from text.take_until(">")
            value, _ = yield from text.take_until("</parameter>")
            yield _format_argument(count, key, value.removeprefix("\n").removesuffix("\n"), tools[name])
            count += 1
        yield ParsedAnswerDelta("arguments", "}" if count else "{}")
        yield from text.skip_whitespace()
        yield from text.skip_mark("</tool_call>")


def _format_argument(count: int, key: str, value: str, schema: Mapping[str, Any]) -> ParsedAnswerDelta:
    """Return number `count` of the arguments of a call as JSON; a value is text if the schema says so, else JSON."""
    properties = schema.get("properties")
    wanted = properties.get(key) if isinstance(properties, dict) else None
    shown = json.dumps(value, ensure_ascii=False)
    if not is_string_schema(wanted):
        with contextlib.suppress(ValueError, RecursionError):
            shown = json.dumps(json.loads(value), ensure_ascii=False)
    return ParsedAnswerDelta("arguments", f"{', ' if count else '{'}{json.dumps(key, ensure_ascii=False)}: {shown}")


def is_string_schema(schema: Any) -> bool:
    """Return whether values of a JSON schema are texts by its `type` or its `enum`."""
    if not isinstance(schema, dict):
        return False
    choices = schema.get("enum")
    texts = isinstance(choices, list) and all(isinstance(one, str) for one in choices)
    return schema.get("type") == "string" or ("type" not in schema and texts)


def parse_harmony_channels(text: StreamingTextReader, tools: Tools) -> Deltas:
    """Yield the deltas of messages on channels: reasoning on `analysis`, calls `to=functions.NAME`, else content (GPT-OSS)."""
    if not (yield from text.skip_mark("<|channel|>", "<|start|>assistant", " to=")):
        yield from text.stream_until("content", "<|end|>", "<|return|>", "<|start|>")
    while text.unread or not text.ended:
        header, mark = yield from text.take_until("<|message|>")
        if mark is None:
            return
        name = re.search(rf"(?:to=)?functions\.({NAME})", header)
        if name is not None and name[1] in tools:
            yield ParsedAnswerDelta("call", name[1])
            yield from text.stream_until("arguments", "<|call|>", "<|end|>", "<|start|>")
        else:
            analysis = header.rpartition("<|channel|>")[2].startswith("analysis")
            yield from text.stream_until(
                "reasoning" if analysis else "content", "<|end|>", "<|return|>", "<|call|>", "<|start|>"
            )


def pass_text_as_content(text: StreamingTextReader, tools: Tools) -> Deltas:
    """Yield the whole text of an answer as deltas of content."""
    yield from text.stream_until("content")


@dataclass(frozen=True)
class ToolFormat:
    """Format of a model family's tool calls: pattern of its chat templates, parser, and texts around name and arguments.

    Attributes:
        name: name of the format.
        template: pattern in the source of chat templates of the format.
        parse: parser of answers.
        call: text of a call before and after its arguments, with the word NAME for the name of the function.
        argument: text before and after each argument, with the word KEY for its name; None if arguments are JSON.
        others: further special tokens that its answers may have.
    """

    name: str
    template: re.Pattern[str]
    parse: Callable[[StreamingTextReader, Tools], Deltas]
    call: tuple[str, str]
    argument: tuple[str, str] | None = None
    others: tuple[str, ...] = ()

    def make_call_id(self, name: str, index: int) -> str:
        """Return an id for call number `index` of an answer, in the form that the family's templates accept."""
        if self.name == "kimi":
            return f"functions.{name}:{index}"
        if self.name.startswith("mistral"):
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{uuid.uuid4().hex}"

    def list_special_marks(self, specials: Mapping[str, int]) -> frozenset[int]:
        """Return the token ids of those `specials` that occur in this format's tool calls or answers."""
        text = "".join((*self.call, *self.others))
        return frozenset(token for name, token in specials.items() if name in text)


DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DEEPSEEK_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CODE = "function<｜tool▁sep｜>NAME\n```json\n"
TEXT_FORMAT = ToolFormat("text", re.compile(r"(?!)"), pass_text_as_content, ("", ""))
PLAIN_FORMAT = ToolFormat("hermes", re.compile("<tool_call>"), parse_hermes_tool_calls, ('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>"))  # fmt: skip
"""Format that the server itself describes for templates without tools."""

TOOL_FORMATS: Sequence[ToolFormat] = (
    ToolFormat("harmony", re.compile(r"<\|channel\|>"), parse_harmony_channels, ("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", ""), others=("<|start|>", "<|end|>", "<|call|>", "<|return|>")),
    ToolFormat("kimi", re.compile(r"<\|tool_calls_section_begin\|>"), parse_kimi_tool_calls, ("<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>", "<|tool_call_end|><|tool_calls_section_end|>")),
    ToolFormat("deepseek-v3", re.compile(r"<｜tool▁sep｜>(?s:.)*```json"), parse_deepseek_tool_calls, (DEEPSEEK + CODE, "\n```" + DEEPSEEK_END)),
    ToolFormat("deepseek-v3.1", re.compile("<｜tool▁sep｜>"), parse_deepseek_tool_calls, (DEEPSEEK + "NAME<｜tool▁sep｜>", DEEPSEEK_END)),
    ToolFormat("mistral-v11", re.compile(r"\[TOOL_CALLS\](?s:.)*\[ARGS\]"), parse_mistral_tool_calls, ("[TOOL_CALLS]NAME[ARGS]", ""), others=("[CALL_ID]",)),
    ToolFormat("mistral", re.compile(r"\[TOOL_CALLS\]"), parse_mistral_tool_calls, ('[TOOL_CALLS] [{"name": "NAME", "arguments": ', "}]"), others=("[ARGS]", "[CALL_ID]")),
    ToolFormat("glm", re.compile("<arg_key>"), parse_glm_tool_calls, ("<tool_call>NAME\n", "</tool_call>"), ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")),
    ToolFormat("qwen3-coder", re.compile("<function="), parse_qwen_coder_tool_calls, ("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>"), ("<parameter=KEY>\n", "\n</parameter>\n")),
    PLAIN_FORMAT,
    ToolFormat("llama3", re.compile(r"<\|python_tag\|>|\"parameters\""), parse_json_tool_calls, ('{"name": "NAME", "parameters": ', "}"), others=("<|python_tag|>",)),
)  # fmt: skip
"""All formats, the most specific first: a template has the first one whose pattern it contains."""

UNKNOWN_FORMATS = re.compile(r"<\|START_ACTION\|>|<｜DSML｜|<\|tool▁|<function_calls>|```tool_code")
"""Markers of call formats that are not supported."""

REASONING_MARKS = (
    ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)  # fmt: skip
