"""Lark grammars (llguidance) of answers with tool calls in the format of a model family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mega_common.errors import DataError
from mega_eval.server.tool_formats import ToolFormat, is_string_schema

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
TEXT_KEYWORDS = frozenset({"type", "enum", "const", "minLength", "maxLength"})  # of JSON schema
ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
SHARED_KEYWORDS = ("$defs", "definitions")
ANY_TEXT = "/(?s:.*)/"
NO_BARE_JSON = r"/([^\s{\[](?s:.*))?/"
ANY_KEY = r"/[^<>\s]{1,64}/"


@dataclass(frozen=True)
class CallableTool:
    """Tool for a grammar: its name, and the JSON schema of its arguments; None for any arguments."""

    name: str
    schema: Mapping[str, Any] | None


@dataclass
class LarkGrammarBuilder:
    """Builder of a Lark grammar for llguidance, which collects the grammar's rules.

    Attributes:
        specials: token ids of special tokens, by their texts.
        rules: lines of the grammar so far.
    """

    specials: Mapping[str, int]
    rules: list[str] = field(default_factory=list)

    def add_rule(self, body: str, attribute: str = "") -> str:
        """Add a rule and return its name."""
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{attribute}: {body}")
        return name

    def write_literal(self, text: str) -> str:
        """Return the Lark expression of a text, with special tokens as token ids."""
        if not self.specials:
            return json.dumps(text)
        names = "|".join(sorted(map(re.escape, self.specials), key=len, reverse=True))
        parts = [part for part in re.split(f"({names})", text) if part]
        found = [f"<[{self.specials[part]}]>" if part in self.specials else json.dumps(part) for part in parts]
        return " ".join(found) or '""'

    def add_text_rule_without(self, mark: str, *, bare_json: bool = True) -> str:
        """Add a rule of any text in which `mark` is not spelled out, and return its name.
        With `bare_json` False the text does not begin with an object or a list, which may be a call.
        """
        text = f"TEXT_{len(self.rules)}"
        self.rules.append(f"{text}: {ANY_TEXT if bare_json else NO_BARE_JSON} & ~/(?s:.*){re.escape(mark)}(?s:.*)/")
        return self.add_rule(text)

    def add_text_rule_until(self, mark: str, *, bare_json: bool = True) -> str:
        """Add a rule of any text up to the first `mark`, included, and return its name.
        With `bare_json` False the text does not begin with an object or a list, which may be a call.
        """
        if mark in self.specials:
            return self.add_rule(f"{self.add_text_rule_without(mark, bare_json=bare_json)} {self.write_literal(mark)}")
        return self.add_rule(f"{ANY_TEXT if bare_json else NO_BARE_JSON} {json.dumps(mark)}", "[lazy]")

    def add_json_schema_rule(self, schema: Mapping[str, Any]) -> str:
        """Add a rule of JSON that follows a schema, with at most one space between tokens; return its name."""
        spaced = {**schema, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": " ?"}}
        return self.add_rule(f"%json {json.dumps(spaced)}")

    def add_tool_call_rule(self, form: ToolFormat, tool: CallableTool) -> str:
        """Add a rule for one call of a tool, from the tool's name to the end of its arguments; return the rule's name."""
        before, after = (text.replace("NAME", tool.name) for text in form.call)
        if form.argument is None:
            arguments = self.add_json_schema_rule({"type": "object"} if tool.schema is None else tool.schema)
        elif tool.schema is None:
            arguments = self._add_any_arguments(form.argument)
        else:
            arguments = self._add_arguments(form.argument, tool.name, tool.schema)
        opening = find_tool_call_opening(form, self.specials)
        parts = [before.removeprefix(opening), arguments, after]
        return self.add_rule(
            " ".join(part if part is arguments else self.write_literal(part) for part in parts if part)
        )

    def _add_any_arguments(self, marks: tuple[str, str]) -> str:
        """Add a rule of arguments of any names and values that each have a start and an end mark."""
        before, _, after = marks[0].partition("KEY")
        value = self.add_text_rule_until(marks[1])
        one = self.add_rule(f"{self.write_literal(before)} {ANY_KEY} {self.write_literal(after)} {value}")
        return self.add_rule(f"{one}*")

    def _add_arguments(self, marks: tuple[str, str], tool: str, schema: Mapping[str, Any]) -> str:
        """Add a rule of arguments that each have a start and an end mark, in the order of the schema's properties."""
        properties = schema.get("properties", {})
        extra = sorted(schema.keys() - {"type", "properties", "required", "additionalProperties", "$schema", "strict", *SHARED_KEYWORDS} - ANNOTATIONS)  # fmt: skip
        if extra or not isinstance(properties, dict):
            raise DataError(
                f"tool {tool!r}: the keyword {(extra or ['properties'])[0]!r} of its parameters is not supported with "
                "the call format of this model's chat template"
            )
        shared = {name: schema[name] for name in SHARED_KEYWORDS if name in schema}
        found = []
        for key, wanted in properties.items():
            begin, end = (mark.replace("KEY", key) for mark in marks)
            value = self._add_value(tool, key, wanted, end, shared)
            one = self.add_rule(f"{self.write_literal(begin)} {value}")
            found.append(one if key in schema.get("required", ()) else f"{one}?")
        return self.add_rule(" ".join(found) or '""')

    def _add_value(self, tool: str, key: str, wanted: Any, end: str, shared: Mapping[str, Any]) -> str:
        """Add a rule of one value up to its end mark: raw text if the schema says so, else JSON."""
        if not is_string_schema(wanted):
            schema = {**wanted, **shared} if isinstance(wanted, dict) else {}
            return self.add_rule(f"{self.add_json_schema_rule(schema)} {self.write_literal(end)}")
        unknown = sorted(wanted.keys() - TEXT_KEYWORDS - ANNOTATIONS)
        if unknown:
            raise DataError(
                f"tool {tool!r}: the keyword {unknown[0]!r} of the parameter {key!r} is not supported with the call "
                "format of this model's chat template"
            )
        if choices := wanted.get("enum", [wanted["const"]] if "const" in wanted else []):
            return self.add_rule(f"({' | '.join(map(self.write_literal, choices))}) {self.write_literal(end)}")
        least, most = wanted.get("minLength", 0), wanted.get("maxLength", "")
        text = f"/(?s:.{{{least},{most}}})/" if least or most else ANY_TEXT
        return self.add_rule(f"{text} {json.dumps(end)}", "[lazy]")


def find_tool_call_opening(form: ToolFormat, specials: Mapping[str, int]) -> str:
    """Return the text that opens a tool call in a format: a special token, a tag, or a brace."""
    tag = re.match(r"<[^>]*>|\[TOOL_CALLS\]|\{", form.call[0])
    assert tag is not None
    return tag[0]


def build_tool_call_grammar(
    form: ToolFormat,
    tools: Sequence[CallableTool],
    specials: Mapping[str, int],
    *,
    required: bool,
    reasoning_end: str | None,
) -> str:
    """Return the Lark grammar of an answer with exactly one tool call if `required`, else with at most one.

    Args:
        form: format of the call.
        tools: tools that may be called.
        specials: token ids of special tokens, by their texts.
        required: the answer is a call; else it is text, or text and a call.
        reasoning_end: mark that ends reasoning that the prompt has opened; None if the prompt has not.

    Raises:
        DataError: for a schema that the format cannot express.
    """
    writer = LarkGrammarBuilder(specials)
    call = writer.add_rule(" | ".join(writer.add_tool_call_rule(form, tool) for tool in tools))
    opening = find_tool_call_opening(form, specials)
    literal = writer.write_literal(opening)
    start = f"{literal} {call}"
    if form.name == "harmony":
        reasoning = _add_analysis(writer)
        final = writer.write_literal("<|channel|>final<|message|>")
        said = writer.add_rule(f"{final} {writer.add_text_rule_without('<|start|>')}")
        start = f"{reasoning}? {start}" if required else f"{reasoning}? ({start} | {said})"
    elif not required:
        bare = form.name not in ("hermes", "llama3")  # their calls may be the JSON that an answer begins with
        if opening == "{":
            text, before = writer.add_rule(NO_BARE_JSON), literal
        else:
            text = writer.add_text_rule_without(opening, bare_json=bare)
            before = writer.add_text_rule_until(opening, bare_json=bare)
        start = f"{text} | {before} {call}"
    if reasoning_end is not None:
        start = f"{_add_reasoning(writer, reasoning_end)} ({start})"
    return "\n".join([f"start: {start}", *writer.rules])


def build_answer_grammar(
    form: ToolFormat, schema: str, specials: Mapping[str, int], *, reasoning_end: str | None
) -> str:
    """Return the Lark grammar of an answer whose content is JSON that follows a schema, after reasoning.

    Args:
        form: format of the model's answers.
        schema: JSON schema as text.
        specials: token ids of special tokens, by their texts.
        reasoning_end: mark that ends reasoning that the prompt has opened; None for answers on channels (GPT-OSS).
    """
    writer = LarkGrammarBuilder(specials)
    content = writer.add_json_schema_rule(json.loads(schema))
    if reasoning_end is None:
        final = writer.write_literal("<|channel|>final<|message|>")
        start = f"{_add_analysis(writer)}? {final} {content}"
    else:
        start = f"{_add_reasoning(writer, reasoning_end)} {content}"
    return "\n".join([f"start: {start}", *writer.rules])


def _add_analysis(writer: LarkGrammarBuilder) -> str:
    """Add a rule of reasoning on a channel of its own, up to the channel of the next message."""
    begin = writer.write_literal("<|channel|>analysis<|message|>")
    return writer.add_rule(f"{begin} {ANY_TEXT} {writer.write_literal('<|end|><|start|>assistant')}")


def _add_reasoning(writer: LarkGrammarBuilder, end: str) -> str:
    """Add a rule of the rest of reasoning up to its `end` and the white space after it."""
    before, space = writer.add_text_rule_until(end), writer.add_rule(r"/[ \n]{0,2}/")
    return f"{before} {space}"
