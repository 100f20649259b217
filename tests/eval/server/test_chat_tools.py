"""Tools in chats, by OpenAI's own client, with templates that render tools and one that does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from served_models import chat_model, engine_for, openai_client
from serving import service_of, serving

PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"], "additionalProperties": False}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tell the weather.", "parameters": PLACE}}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "additionalProperties": False}}}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory, "the end of the story is the beginning", max_position=4096)


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[OpenAI]:
    service = service_of(engine_for(folder, cache_tokens=8192), folder, max_length=2048)
    with serving(service) as (url, _), openai_client(url) as client:
        yield client


def chat(client: OpenAI, **options: Any) -> Any:
    given = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the end?"}],
        "temperature": 0,
        "max_tokens": 120,
    }
    return client.chat.completions.create(**{**given, **options})


def prompt_of(client: OpenAI, **options: Any) -> int:
    return int(chat(client, max_tokens=1, **options).usage.prompt_tokens)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ({"type": "function", "function": {"name": "clock"}}, {"clock"}),
    ],
)
def test_a_call_that_is_required_obeys_its_schema(client: OpenAI, choice: Any, names: set[str]) -> None:
    options: dict[str, Any] = {"tools": [WEATHER, CLOCK], "tool_choice": choice, "temperature": 1, "seed": 3}
    answer = chat(client, **options).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    (call,) = answer.message.tool_calls
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    assert arguments.get("place") in (("Rome", "Oslo") if call.function.name == "weather" else (None,))
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **options)]
    streamed = [one for chunk in chunks for one in chunk.delta.tool_calls or []]
    assert {one.index for one in streamed} == {0}
    assert streamed[0].function.name == call.function.name
    assert "".join(one.function.arguments for one in streamed) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"


def test_tools_are_in_the_prompt_unless_none_may_be_called(client: OpenAI, folder: Path) -> None:
    plain = prompt_of(client)
    assert prompt_of(client, tools=[WEATHER]) > plain + 20
    assert prompt_of(client, tools=[WEATHER], tool_choice="auto") == prompt_of(client, tools=[WEATHER])
    assert prompt_of(client, tools=[WEATHER], tool_choice="none") == plain
    assert prompt_of(client, tools=[]) == plain
    assert chat(client, tools=[WEATHER]).choices[0].message.tool_calls is None


def test_a_template_without_tools_has_them_in_the_system_message(folder: Path, tmp_path: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    template = tmp_path / "chat_template.jinja"
    for text, supported in (
        ("{% for one in messages %}{{ one.role + one.content }}{% endfor %}", True),
        ("{{ tools }}<|START_ACTION|>{% for one in messages %}{{ one.content }}{% endfor %}", False),
    ):
        template.write_text(text)
        engine = engine_for(folder, cache_tokens=8192)
        with serving(service_of(engine, tmp_path, max_length=2048)) as (url, _), openai_client(url) as client:
            if supported:
                assert prompt_of(client, tools=[WEATHER]) > prompt_of(client) + 100
                system = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
                assert prompt_of(client, tools=[WEATHER], messages=system) > prompt_of(client, messages=system) + 100
            else:
                with pytest.raises(openai.BadRequestError, match="whose calls begin with"):
                    chat(client, tools=[WEATHER])


def test_calls_and_their_results_come_back_in_messages(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
    messages = [
        {"role": "user", "content": "the end?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    url = str(client.base_url).replace("/v1/", "/tokenize")
    tokens: Any = client.post(url, cast_to=object, body={"messages": messages})
    text: Any = client.post(url.replace("/tok", "/detok"), cast_to=object, body={"tokens": tokens["tokens"]})
    assert '{"name": "weather", "arguments": {"place": "Rome"}}' in text["prompt"]
    assert chat(client, messages=messages, tools=[WEATHER]).choices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type must be 'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name is required"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name must match pattern"),
        ({"tools": {"type": "function"}}, "tools must be a valid list; found an object"),
        ({"tool_choice": "required"}, "requires 'tools'"),
        ({"tool_choice": "any"}, 'tool_choice must be "none", "auto", "required" or'),
        ({"tool_choice": {"type": "function"}}, 'tool_choice must be "none", "auto", "required" or'),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "must name one of the tools; found 'x'"),
        ({"tools": [CLOCK], "response_format": {"type": "json_object"}}, "'tools' are not supported with a grammar"),
        ({"tools": [CLOCK], "extra_body": {"guided_choice": ["a"]}}, "'tools' are not supported with a grammar"),
        ({"functions": [{"name": "f"}]}, "'functions' is not supported by this server; use 'tools'"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no type"}}}], "tool_choice": "required"}, "grammar cannot be"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be(client: OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, **options)
    assert message in error.value.message
