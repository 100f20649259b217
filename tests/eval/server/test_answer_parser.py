"""Answers of model families, whole and cut anywhere: content, reasoning and tool calls."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from chat_templates import ALL_FORMS as FORMS

from mega_eval.server.answer_formats import ChoiceDelta
from mega_eval.server.answer_parser import ModelOutputParser, ModelOutputSyntax, parse_reasoning_and_tool_calls
from mega_eval.server.tool_formats import PLAIN_FORMAT, TOOL_FORMATS

WEATHER = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}}}  # fmt: skip
TOOLS: dict[str, dict[str, Any]] = {"weather": WEATHER, "clock": {}}
THINK = ("<think>", "</think>")
ROME, OSLO, NOW = ("weather", {"place": "Rome"}), ("weather", {"place": 'Oslo, "N" é', "days": 2}), ("clock", {})
FORMS_BY_NAME = {form.name: form for form in TOOL_FORMATS}
DS = "<｜tool▁calls▁begin｜>"

# format, answer, content, reasoning, calls
CASES: list[tuple[str, str, str, str, list[Any]]] = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>', "", "", [ROME]),
    ("hermes", 'Let me see.\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>', "Let me see.", "", [NOW]),
    ("hermes", '<tool_call>{"name": "clock", "arguments": {}}</tool_call>\n<tool_call>{"name": "weather", "arguments": {"place": "Oslo, \\"N\\" é", "days": 2}}</tool_call>', "", "", [NOW, OSLO]),
    ("hermes", '<tool_call>{"arguments": {"place": "Rome"}, "name": "weather"}</tool_call>', "", "", [ROME]),
    ("hermes", '<think>\nWhich?\n</think>\n\n<tool_call>{"name": "clock"}</tool_call>', "", "Which?", [NOW]),
    ("hermes", '<think>a <tool_call> in mind</think>It is 4 < 5 {"x": 1}.', 'It is 4 < 5 {"x": 1}.', "a <tool_call> in mind", []),
    ("hermes", '{"name": "weather", "arguments": {"place": "Rome"}}', "", "", [ROME]),
    ("hermes", ' [{"name": "clock", "arguments": {}}, {"name": "clock"}]', "", "", [NOW, NOW]),
    ("hermes", '{"name": "clock", "arguments": "{}"}', "", "", [NOW]),
    ("hermes", '{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', "", []),
    ("hermes", '<tool_call>{"name": "clock", "argum', '<tool_call>{"name": "clock", "argum', "", []),
    ("hermes", "<tool_call>clock()</tool_call> then", "<tool_call>clock()</tool_call> then", "", []),
    ("hermes", "  [] and <tool", "  [] and <tool", "", []),
    ("hermes", "7", "7", "", []),
    ("llama3", '{"name": "weather", "parameters": {"place": "Rome"}}', "", "", [ROME]),
    ("llama3", '<|python_tag|>{"name": "weather", "parameters": {"place": "Rome"}}; {"name": "clock", "parameters": {}}', "", "", [ROME, NOW]),
    ("llama3", '{"place": "Rome"} is a place', '{"place": "Rome"} is a place', "", []),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"place": "Rome"}}, {"name": "clock", "arguments": {}}]', "", "", [ROME, NOW]),
    ("mistral", "[TOOL_CALLS]weather[ARGS]{\"place\": \"Rome\"}[TOOL_CALLS]clock[ARGS]{}", "", "", [ROME, NOW]),
    ("mistral-v11", "I ask.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{\"place\": \"Rome\"}", "I ask.", "", [ROME]),
    ("mistral", "[TOOL_CALLS]other[ARGS]{}", "[TOOL_CALLS]other[ARGS]{}", "", []),
    ("deepseek-v3", f"Now: {DS}<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{{\"place\": \"Rome\"}}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "Now:", "", [ROME, NOW]),
    ("deepseek-v3.1", f"</think>{DS}<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{{\"place\": \"Rome\"}}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "</think>", "", [ROME, NOW]),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"place\": \"Rome\"}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>", "", "", [ROME, NOW]),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.other:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|> x", "<|tool_call_begin|>functions.other:0 x", "", []),
    ("glm", "<think></think>\n<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>", "", "", [ROME]),
    ("glm", "<tool_call>weather\n<arg_key>place</arg_key>\n<arg_value>7</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><tool_call>clock\n</tool_call>", "", "", [("weather", {"place": "7", "days": 2}), NOW]),
    ("glm", "a <tool_call>other\n</tool_call> b", "a <tool_call>other\n</tool_call> b", "", []),
    ("qwen3-coder", "I ask.\n<tool_call>\n<function=weather>\n<parameter=place>\nRome\n</parameter>\n<parameter=units>\nC\n</parameter>\n</function>\n</tool_call>", "I ask.", "", [("weather", {"place": "Rome", "units": "C"})]),
    ("qwen3-coder", "<function=clock>\n</function> <tool_call>x", "<tool_call>x", "", [NOW]),
    ("harmony", "<|channel|>analysis<|message|>Which place?<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{\"place\": \"Rome\"}<|call|>", "", "Which place?", [ROME]),
    ("harmony", " to=functions.clock<|channel|>commentary json<|message|>{}", "", "", [NOW]),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Sunny.<|return|>", "I look.Sunny.", "", []),
    ("harmony", '{"a": 1}', '{"a": 1}', "", []),
]  # fmt: skip


def parse(
    form: str, pieces: list[str], reasoning: tuple[str, str] | None = THINK, **how: Any
) -> tuple[str, str, list[Any]]:
    """Content, reasoning and calls of an answer in pieces."""
    parser = ModelOutputParser(
        ModelOutputSyntax(FORMS_BY_NAME[form], None if form == "harmony" else reasoning), TOOLS, **how
    )
    deltas = [delta for at, piece in enumerate(pieces) for delta in parser.parse(piece, ended=at == len(pieces) - 1)]
    content = "".join(delta.text for delta in deltas if delta.kind == "content")
    thought = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.kind == "call":
            calls.append((delta.text, ""))
        elif delta.kind == "arguments":
            calls[-1] = calls[-1][0], calls[-1][1] + delta.text
    return content, thought, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("form", "text", "content", "reasoning", "calls"), CASES)
def test_answers_in_pieces_are_the_whole_ones(
    form: str, text: str, content: str, reasoning: str, calls: list[Any]
) -> None:
    expected = content, reasoning, calls
    assert parse(form, [text]) == expected
    assert parse(form, [*text, ""]) == expected
    draw = random.Random(text)
    for _ in range(20):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(4))
        assert parse(form, [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == expected


@pytest.mark.parametrize("form", sorted(FORMS_BY_NAME))
@pytest.mark.parametrize("text", ["", " ", "plain text \n", "<", "[" * 50_000, "{" * 50_000, "<tool_call>" * 2000, '{"name": "' + "a" * 50_000, "<think>" + "x" * 9])  # fmt: skip
def test_text_that_is_no_call_stays(form: str, text: str) -> None:
    content, reasoning, calls = parse(form, [text[at : at + 1000] for at in range(0, len(text), 1000)] or [""])
    assert calls == []
    assert (content + reasoning).replace(" ", "") == text.replace("<think>" if form != "harmony" else "?", "").replace(
        " ", ""
    )


def test_reasoning_that_the_prompt_opened() -> None:
    assert parse("hermes", ["so it", " is.</think>\n\n4"], in_reasoning=True) == ("4", "so it is.", [])
    assert parse("hermes", ["no end"], in_reasoning=True) == ("", "no end", [])
    assert parse("hermes", ["a</think>b"], in_reasoning=True, keep_reasoning=False) == ("b", "", [])
    assert parse("mistral", ["[THINK]a[/THINK]b"], ("[THINK]", "[/THINK]")) == ("b", "a", [])


def test_a_call_streams_its_arguments() -> None:
    parser = ModelOutputParser(ModelOutputSyntax(), TOOLS)
    first = parser.parse('<tool_call>{"name": "weather", "arguments": {"pl', ended=False)
    assert [(delta.kind, delta.text) for delta in first] == [("call", "weather"), ("arguments", '{"pl')]
    assert [delta.text for delta in parser.parse('ace": "Rome"}', ended=False)] == ['ace": "Rome"}']


@pytest.mark.parametrize(
    ("template", "form", "reasoning"),
    [
        (FORMS["qwen"], "hermes", None),
        (FORMS["mistral"], "mistral", None),
        (FORMS["deepseek"], "deepseek-v3", THINK),
        (FORMS["glm"], "glm", THINK),
        (FORMS["kimi"], "kimi", None),
        (FORMS["harmony"], "harmony", None),
        (FORMS["llama3"] + '"parameters"', "llama3", None),
        (FORMS["gemma"], "hermes", None),
        ("<tool_call>{{ '<function=' + name }}", "qwen3-coder", None),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral-v11", None),
        ("<｜tool▁sep｜>{{ arguments }}", "deepseek-v3.1", None),
        ("[TOOL_CALLS] [THINK]{{ thought }}[/THINK]", "mistral", ("[THINK]", "[/THINK]")),
    ],
)  # fmt: skip
def test_a_template_has_a_syntax(template: str, form: str, reasoning: tuple[str, str] | None) -> None:
    syntax = ModelOutputSyntax.detect(template)
    assert (syntax.format.name, syntax.reasoning, syntax.unsupported) == (form, reasoning, None)


def test_a_foreign_format_is_named() -> None:
    assert ModelOutputSyntax.detect("{{ tools }}<|START_ACTION|>").unsupported == "<|START_ACTION|>"


def test_choices_are_parsed_apart() -> None:
    async def said() -> AsyncIterator[ChoiceDelta]:
        for number, text in enumerate(('<tool_call>{"name": "clo', 'ck", "arguments": {}}</tool_call>')):
            yield ChoiceDelta(0, text, None, 1, "stop" if number else None, begins=not number)
            yield ChoiceDelta(1, "other", None, 1, "length" if number else None, begins=not number)

    async def found() -> dict[int, ChoiceDelta]:
        whole: dict[int, ChoiceDelta] = {}
        parser = parse_reasoning_and_tool_calls(
            said(), lambda: ModelOutputParser(ModelOutputSyntax(), TOOLS), PLAIN_FORMAT.make_call_id
        )
        async for part in parser:
            if part.begins:
                whole[part.choice] = part
            else:
                whole[part.choice].append_delta(part)
        return whole

    whole = asyncio.run(found())
    assert (whole[1].text, whole[1].calls, whole[1].finish) == ("otherother", [], "length")
    assert (whole[0].text, whole[0].finish, whole[0].count) == ("", "tool_calls", 2)
    assert [call.format_call()["function"] for call in whole[0].calls] == [{"name": "clock", "arguments": "{}"}]
