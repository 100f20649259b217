"""Conversations with tools in the call formats of six families and one more: whole, streamed, and constrained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jsonschema
import openai
import pytest
from chat_templates import chat_tokenizer
from openai import OpenAI
from served_models import STORY, openai_client
from serving import Playback, service_of, serving
from tiny_models import save_tiny, variant

from mega_ckpt.families import find_family_by_name
from mega_common.errors import DataError
from mega_data.chat.chat_template import read_chat_template
from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.grammar_matcher import GrammarCache
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import load_inference_model
from mega_eval.server.answer_parser import ModelOutputSyntax
from mega_eval.server.call_grammars import CallableTool, build_tool_call_grammar
from mega_eval.server.messages_api import MessagesRequest
from mega_eval.server.request_schemas import ChatRequest
from mega_eval.server.responses_api import ResponsesRequest
from mega_eval.server.token_spelling import Vocabulary
from mega_eval.server.tool_formats import TOOL_FORMATS

PLACE = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["place"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Weather.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
ROME, NOW = ("weather", {"place": "Rome"}), ("clock", {})
LONG = ("weather", {"place": 'Zürich "HB"\n', "days": 3})
LLAMA3 = next(form for form in TOOL_FORMATS if form.name == "llama3")
FAMILIES = ("qwen", "llama3", "mistral", "deepseek", "glm", "harmony", "kimi")


def write_call(family: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model of the family writes it."""
    text = json.dumps(arguments, ensure_ascii=False)
    if family == "glm":
        values = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items()]
        inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values)
        return f"<tool_call>{name}\n{inside}</tool_call>"
    return {
        "qwen": f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>',
        "llama3": f'{{"name": "{name}", "parameters": {text}}}',
        "mistral": f'{{"name": "{name}", "arguments": {text}}}',
        "deepseek": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>",
        "kimi": f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{text}<|tool_call_end|>",
        "harmony": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>",
    }[family]


def write_answer(family: str, content: str, reasoning: str, calls: list[Any]) -> str:
    """An answer as a model of the family writes it."""
    written = [write_call(family, *call) for call in calls]
    if family == "harmony":
        thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
        said = f"<|channel|>{'commentary' if calls else 'final'}<|message|>{content}" if content else ""
        return thought + "<|end|><|start|>assistant".join([*([said] if said else []), *written])
    around = {
        "mistral": ("[TOOL_CALLS] [", ", ", "]"), "llama3": ("", "; ", ""),
        "deepseek": ("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
        "kimi": ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
    }.get(family, ("", "\n", ""))  # fmt: skip
    begin, between, end = around if calls else ("", "", "")
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return thought + content + begin + between.join(written) + end


ANSWERS: dict[str, tuple[str, str, list[Any]]] = {
    "one call": ("", "", [ROME]),
    "a call without arguments": ("", "", [NOW]),
    "quotes and lines": ("", "", [LONG]),
    "words first": ("I look it up.", "", [ROME]),
    "two calls": ("", "", [ROME, NOW]),
    "reasoning": ("", "Rome is in Italy.", [ROME]),
    "no call": ('It is <b>{"sunny"}</b>.', "", []),
}
UNKNOWN = {
    ("llama3", "words first"),  # a model of that family writes a call or words
    ("mistral", "reasoning"), ("llama3", "reasoning"), ("kimi", "reasoning"), ("qwen", "reasoning"),
}  # fmt: skip
CASES = [(family, name) for family in FAMILIES for name in ANSWERS if (family, name) not in UNKNOWN]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("base")
    train_tokenizer([STORY] * 3, 290, base)
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in folders.items():
        chat_tokenizer(base, folder, family, marks=False)
    return folders


@pytest.fixture(scope="module")
def engines(folders: dict[str, Path]) -> dict[str, Playback]:
    return {family: Playback(folder) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def client(folders: dict[str, Path], engines: dict[str, Playback]) -> Iterator[OpenAI]:
    """One server for all families, each a model of its own."""
    services = [service_of(engines[name], folder, name=name, max_length=4096) for name, folder in folders.items()]
    with serving(*services) as (url, _), openai_client(url) as client:
        yield client


def read_stream(chunks: Any) -> tuple[str, str, list[Any], list[str], str]:
    """Content, reasoning, calls with their ids, and finish reason of a stream."""
    content, reasoning, calls, finish = "", "", [], ""
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                calls.append([call.function.name, "", call.id])
            assert call.index == len(calls) - 1
            calls[-1][1] += call.function.arguments
        finish = choice.finish_reason or finish
    return content, reasoning, [(name, json.loads(text)) for name, text, _ in calls], [one for *_, one in calls], finish


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_conversation_with_tools_goes_round(
    client: OpenAI, engines: dict[str, Playback], family: str, name: str
) -> None:
    content, reasoning, calls = ANSWERS[name]
    engine, text = engines[family], write_answer(family, content, reasoning, calls)
    asked: list[Any] = [{"role": "system", "content": "Be the dog."}, {"role": "user", "content": "Weather?"}]
    options: dict[str, Any] = {"model": family, "tools": TOOLS, "temperature": 0}
    engine.answers += [text, text]
    whole = client.chat.completions.create(messages=asked, **options).choices[0]
    message = whole.message
    assert '"weather"' in engine.prompts[-1]
    found = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    assert (message.content or "", getattr(message, "reasoning_content", ""), found) == (content, reasoning, calls)
    assert whole.finish_reason == ("tool_calls" if calls else "stop")
    streamed = read_stream(client.chat.completions.create(messages=asked, stream=True, **options))
    assert (*streamed[:3], streamed[4]) == (content, reasoning, calls, whole.finish_reason)
    assert not engine.answers
    if not calls:
        return
    turn = message.model_dump(exclude_none=True)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result {at}"}
        for at, call in enumerate(message.tool_calls or [])
    ]
    engine.answers.append(write_answer(family, "It is sunny.", "", []))
    last = client.chat.completions.create(messages=[*asked, turn, *results], **options).choices[0].message
    assert (last.content, last.tool_calls) == ("It is sunny.", None)
    prompt = engine.prompts[-1]
    assert all(call[0] in prompt and f"result {at}" in prompt for at, call in enumerate(calls))
    if calls[0] == ROME:
        assert "Rome" in prompt


STRICT = {
    "type": "object",
    "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}, "warm": {"type": "boolean"}},
    "required": ["place", "days"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def drawn(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """Random models, which write anything that a grammar allows."""
    services = []
    for family, folder in folders.items():
        tokenizer = Tokenizer(folder)
        config = variant("grouped").model_copy(update={"vocab_size": tokenizer.vocab_size, "max_position": 4096})
        save_tiny(folder, find_family_by_name("llama"), config)
        engine = InferenceEngine(load_inference_model(folder), tokenizer, cache_tokens=4096, batch_size=8)
        services.append(service_of(engine, folder, name=family, max_length=2048))
    with serving(*services) as (url, _), openai_client(url) as client:
        yield client


@pytest.mark.parametrize("family", FAMILIES)
def test_required_calls_follow_their_schema(drawn: OpenAI, family: str) -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": "weather", "parameters": STRICT}},
        {"type": "function", "function": {"name": "clock"}},
    ]
    asked: list[Any] = [{"role": "user", "content": "Weather?"}]
    for seed, choice in enumerate(("required", {"type": "function", "function": {"name": "weather"}}, "required")):
        options: dict[str, Any] = {
            "model": family,
            "tools": tools,
            "tool_choice": choice,
            "seed": seed,
            "max_tokens": 300,
        }
        answer = drawn.chat.completions.create(messages=asked, **options).choices[0]
        if family == "harmony" and answer.finish_reason == "length":  # its reasoning, which has no bound
            assert getattr(answer.message, "reasoning_content", "")
            continue
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls or []
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            jsonschema.validate(arguments, STRICT)
        else:
            assert (choice, arguments) == ("required", {})
        streamed = read_stream(drawn.chat.completions.create(messages=asked, stream=True, **options))
        assert streamed[2] == [(call.function.name, arguments)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_strict_tool_may_stay_uncalled(drawn: OpenAI, family: str) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": STRICT, "strict": True}}]
    asked: list[Any] = [{"role": "user", "content": "Weather?"}]
    answer = drawn.chat.completions.create(model=family, messages=asked, tools=tools, seed=1, max_tokens=40).choices[0]
    assert answer.finish_reason in ("length", "stop", "tool_calls")
    for call in (answer.message.tool_calls or []) if answer.finish_reason == "tool_calls" else []:
        jsonschema.validate(json.loads(call.function.arguments), STRICT)


ONE_CALL: list[tuple[str, str, list[Any], bool]] = [
    ("words", "It is <b>sunny</b>.", [], True),
    ("one call", "", [ROME], True),
    ("a call without arguments", "", [NOW], True),
    ("two calls", "", [ROME, NOW], False),
    ("words and two calls", "I look.", [ROME, NOW], False),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_call_is_all_that_the_grammar_allows(folders: dict[str, Path], family: str) -> None:
    tokenizer = Tokenizer(folders[family])
    specials = Vocabulary(tokenizer).specials
    form = {"llama3": LLAMA3}.get(family) or ModelOutputSyntax.detect(read_chat_template(tokenizer.path).source).format
    tools = [CallableTool(name, None) for name in ("weather", "clock")]
    grammar = build_tool_call_grammar(form, tools, specials, required=False, reasoning_end=None)
    cache, ends = GrammarCache(tokenizer), [specials["<|endoftext|>"]]

    def allows(text: str, *, spelled: bool = False) -> bool:
        """Whether the grammar allows a text as tokens; `spelled`: without special tokens."""
        matcher = cache.get_grammar_matcher(grammar, ends)
        tokens = [token for one in text for token in tokenizer.encode(one)] if spelled else tokenizer.encode(text)
        try:
            for at, token in enumerate([*tokens, *ends], 1):
                if matcher.accept_token(token):
                    return at >= len(tokens)
        except DataError:
            return False
        return True

    for name, content, calls, allowed in ONE_CALL:
        if family in ("harmony", "llama3") and content and calls:
            continue  # calls without words
        text = write_answer(family, content, "", calls).removesuffix("<|call|>")  # an end token
        assert allows(text) == allowed, name
        if len(calls) > 1:
            assert not allows(text, spelled=True), f"{name}, spelled"


def test_every_api_has_a_field_for_a_single_call(drawn: OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "?"}]
    chat = ChatRequest(messages=asked, tools=TOOLS, parallel_tool_calls=False)
    message = {"max_tokens": 9, "messages": asked, "tools": [{"name": "f", "input_schema": {}}]}
    response = {"input": "?", "tools": [{"type": "function", "name": "f"}]}
    once = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    for one, many in (
        (chat, chat.model_copy(update={"parallel_tool_calls": True})),
        (MessagesRequest(**message, **once).to_chat_request(), MessagesRequest(**message).to_chat_request()),
        (
            ResponsesRequest(**response, parallel_tool_calls=False).to_chat_request(),
            ResponsesRequest(**response).to_chat_request(),
        ),
    ):
        assert (one.constrains_tool_calls(), many.constrains_tool_calls()) == (True, False)
    answer = drawn.chat.completions.create(model="glm", messages=asked, tools=TOOLS, parallel_tool_calls=False, max_tokens=20, seed=1)  # fmt: skip
    assert len(answer.choices[0].message.tool_calls or []) <= 1
    with pytest.raises(
        openai.BadRequestError, match=r"'min_tokens' is not supported with .*'parallel_tool_calls': false"
    ):
        drawn.chat.completions.create(model="glm", messages=asked, tools=TOOLS, parallel_tool_calls=False, extra_body={"min_tokens": 5})  # fmt: skip


def test_a_schema_that_a_format_cannot_express_is_refused_by_name(drawn: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}, "required": ["a"]}
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(openai.BadRequestError, match="'pattern' of the parameter 'a' is not supported"):
        drawn.chat.completions.create(
            model="glm", messages=[{"role": "user", "content": "?"}], tools=tools, tool_choice="required"
        )


def test_models_are_found_by_name(client: OpenAI) -> None:
    assert [model.id for model in client.models.list().data] == list(FAMILIES)
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "?"}])
    root = str(client.base_url).replace("/v1/", "")
    assert httpx.get(f"{root}/health").json() == {"status": "ok"}
