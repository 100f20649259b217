"""No part of a record vanishes without a word where a chat template does not render it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import chat_tokenizer

from mega_common.errors import DataError
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.chat.chat_records import parse_chat_record
from mega_data.chat.chat_template import ChatTemplate
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus

pytest.importorskip("transformers", reason="what renders templates")
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
CALLS = PLAIN.replace("</s>", "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}</s>")
TOOLS = "{{ tools | tojson }}" + CALLS
NAMES = PLAIN.replace("{{ m.role }}", "{{ m.role }}{{ m.name }}")
FIRST = CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
ONLY_NAMES = CALLS.replace("c.function | tojson", "c.function.name")
ONLY_ARGUMENTS = CALLS.replace("c.function | tojson", "c.function.arguments")
ROLES = PLAIN.replace("in messages", "in messages if m.role in ('user', 'assistant')")
LAST_THOUGHT = PLAIN.replace("m.content | trim", "m.content.split('</think>')[-1] | trim")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(name: str = "weather", **arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def record(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    question = {"role": "user", "content": "how is the weather in Rome?"}
    return {"messages": [question, *messages, {"role": "assistant", "content": "it is sunny in Rome today"}], **more}


CALLING = {"role": "assistant", "content": "", "tool_calls": [call(city="Rome")]}
TWICE = {"role": "assistant", "content": "", "tool_calls": [call(city="Rome"), call(city="Oslo")]}
ANSWERED = {"role": "tool", "content": "sunny", "tool_call_id": "1"}


def notes(template: str, raw: dict[str, Any], *, marks: bool = False, **how: Any) -> tuple[str, ...]:
    (conversation,) = parse_chat_record(json.dumps(raw), pairs=False, loss_on=how.get("loss_on", "answers"))
    if marks:
        template = template.replace("</s>", "{% generation %}</s>{% endgeneration %}")
    return ChatTemplate({"default": template}, {}, {}).render_chat(conversation, how.get("loss_on", "answers")).notes


@pytest.mark.parametrize("loss_on", ["answers", "all"])
@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize(
    ("template", "raw", "said"),
    [
        (PLAIN, record(CALLING, ANSWERED), "message 1: .* 'tool_calls'"),
        (PLAIN, record({"role": "assistant", "tool_calls": [call()]}), "message 1: .* 'tool_calls'"),
        (PLAIN, record({"role": "assistant", "content": "I look", "function_call": call()["function"]}), "'function_call'"),
        (PLAIN, record(tools=[TOOL]), "'tools'"),
        (CALLS, record(CALLING, ANSWERED, tools=[TOOL]), "'tools'"),
        (PLAIN, record(tools=json.dumps([TOOL])), "'tools'"),
        (FIRST, record(TWICE), "the whole tool call 1"),
        (ONLY_NAMES, record(CALLING), "the arguments of tool call 0"),
        (ONLY_ARGUMENTS, record(CALLING), "the name of tool call 0"),
        (ROLES, record({"role": "system", "content": "be brief"}), "message 1: .* content of role 'system'"),
        (ROLES, record({"role": "developer", "content": "a rather long text that is not rendered"}), "role 'developer'"),
        (ROLES, record({"role": "critic", "content": "assistant"}), "role 'critic'"),
        (ROLES, record({"role": "tool", "content": "s"}), "role 'tool'"),
        ("Q: " + PLAIN.replace("in messages", "in messages[1:]"), record(), "message 0: .* role 'user'"),
    ],
)  # fmt: skip
def test_what_a_conversation_is_made_of_is_refused(
    template: str, raw: dict[str, Any], said: str, marks: bool, loss_on: str
) -> None:
    with pytest.raises(DataError, match=said) as raised:
        notes(template, raw, marks=marks, loss_on=loss_on)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("template", "raw", "noted"),
    [
        (PLAIN, record({"role": "assistant", "content": "so", "reasoning_content": "hm"}), ["'reasoning_content'"]),
        (PLAIN, record({"role": "assistant", "content": "so", "reasoning": "hm", "thinking": "hm"}), ["'reasoning'", "'thinking'"]),
        (PLAIN, record({"role": "user", "content": "hello", "name": "Ann"}), ["'name'"]),
        (PLAIN, record({"role": "assistant", "content": "so", "refusal": "no", "annotations": []}), ["'refusal'"]),
        (PLAIN, record({"role": "assistant", "content": "so", "audio": {"id": "1"}}), ["'audio'"]),
        (LAST_THOUGHT, record({"role": "assistant", "content": "<think>hm</think>it rains"}), ["reasoning in its content"]),
        (PLAIN, record({"role": "assistant", "content": "<think>hm</think>it rains"}), []),
        (NAMES, record({"role": "user", "content": "hello", "name": "Ann"}), []),
        (PLAIN, record({"role": "user", "content": "hello", "id": 7}), []),
        (PLAIN, record(), []),
        (CALLS, record(CALLING, ANSWERED), []),
        (TOOLS, record(TWICE, ANSWERED, tools=[TOOL]), []),
        (PLAIN, record({"role": "user", "content": " \n "}), []),
        (PLAIN, record(chat_template_kwargs={"enable_thinking": False}), ["'enable_thinking' in 'chat_template_kwargs'"]),
        (PLAIN, record(chat_template_kwargs={"mess": 1}), ["'mess' in 'chat_template_kwargs'"]),
        ("{{ date }}" + PLAIN, record(chat_template_kwargs={"date": "today", "dates": 1}), ["'dates'"]),
        ("{% if hush is defined %}{% endif %}" + PLAIN, record(chat_template_kwargs={"hush": True}), []),
    ],
)  # fmt: skip
def test_what_else_a_message_has_is_noted(template: str, raw: dict[str, Any], noted: list[str]) -> None:
    found = notes(template, raw)
    assert len(found) == len(noted)
    assert all(word in note for word, note in zip(noted, found, strict=True))


def test_notes_are_counted_and_refusals_set_aside(
    tmp_path: Path, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = chat_tokenizer(tokenizer_folder, tmp_path / "t", "qwen", marks=False)
    records = [record({"role": "user", "content": "hello", "name": "Ann"}), record(), record(tools=[TOOL])] * 2
    records.append(record({"role": "moderator", "content": "stop"}))
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    with pytest.raises(DataError, match=r"d.jsonl:7: message 1: the chat template does not render the content of role"):
        preprocess_corpus([tmp_path / "d.jsonl"], folder, tmp_path / "d", chat=ChatOptions())
    info = preprocess_corpus([tmp_path / "d.jsonl"], folder, tmp_path / "d", chat=ChatOptions(), on_bad_line="skip")
    assert info.chat is not None
    ((note, count),) = info.chat.notes.items()
    assert (info.skipped.bad, count) == (1, 2)
    assert f"2 conversations {note}" in caplog.messages


def test_options_that_the_template_does_not_use_are_named(
    tmp_path: Path, tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = chat_tokenizer(tokenizer_folder, tmp_path / "t", "qwen", marks=False)
    (tmp_path / "d.jsonl").write_text(json.dumps(record()) + "\n")
    options = ChatOptions(template_options={"enable_thinkin": False, "messages": []})
    with pytest.raises(DataError):
        preprocess_corpus([tmp_path / "d.jsonl"], folder, tmp_path / "d", chat=options)
    assert [message for message in caplog.messages if message.startswith("--template-option")] == [
        "--template-option enable_thinkin has no effect: the chat template does not use this variable"
    ]
