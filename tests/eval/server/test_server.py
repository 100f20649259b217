"""OpenAI's own client against the server, with a tiny model: one start for all tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from openai import OpenAI
from served_models import chat_model, openai_client
from serving import service_of, serving, until
from tiny_adapters import save_adapter

from mega_common.lora_config import LoraConfig
from mega_data.tokenizer import Tokenizer
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import LoraAdapterSet, load_inference_model
from mega_eval.server.model_service import ModelService
from mega_trainer.model.decoder import Decoder

TEXT = "the end of the story is the beginning of the other story 🎉 naïve"
KEY = "sk-tiny-key"
PROMPT = "the story of"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory, TEXT, vocab_size=280)


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return load_inference_model(folder)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path, lora = tmp_path_factory.mktemp("adapters"), LoraConfig(rank=2, modules=["q_proj", "o_proj"])
    return {name: str(save_adapter(path / name, folder, lora, seed=seed)) for seed, name in enumerate(("sql", "poems"))}


@pytest.fixture(scope="module")
def service(folder: Path, adapters: dict[str, str]) -> ModelService:
    beside = LoraAdapterSet.open_adapters(folder, adapters)
    model, selection = load_inference_model(folder, lora_adapters=beside), beside.pool.selection
    engine = InferenceEngine(model, Tokenizer(folder), cache_tokens=2048, batch_size=8, adapters=selection)
    return service_of(engine, folder, adapters=adapters)


@pytest.fixture(scope="module")
def client(service: ModelService) -> Iterator[OpenAI]:
    with serving(service, key=KEY) as (url, _), openai_client(url, KEY) as client:
        yield client


def complete(client: OpenAI, **options: Any) -> Any:
    return client.completions.create(
        **{"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 9, **options}
    )


def chat(client: OpenAI, text: str = "the end?", **options: Any) -> Any:
    given = {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 9}
    return client.chat.completions.create(**{**given, **options})


@torch.inference_mode()
def logprobs_of(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """[S, V], of one pass over all tokens."""
    ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    return (
        model.compute_logits(model(model.embed_inputs(ids, positions), model.make_forward_context(positions)))[0]
        .double()
        .log_softmax(-1)
    )


def test_models_and_facts(client: OpenAI, adapters: dict[str, str]) -> None:
    one, *others = client.models.list().data
    assert one == client.models.retrieve("tiny")
    assert (one.id, one.max_model_len, one.parent) == ("tiny", 256, None)
    assert [(other.id, other.root, other.parent) for other in others] == [
        (name, path, "tiny") for name, path in adapters.items()
    ]
    assert client.models.retrieve("poems") == others[1]
    assert client.get(str(client.base_url).replace("/v1/", "/version"), cast_to=object) == {"version": "1.2"}
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        client.models.retrieve("other")


def test_greedy_completion_is_the_models_likeliest_text(client: OpenAI, model: Decoder, service: ModelService) -> None:
    tokens = prompt = service.tokenizer.encode(PROMPT)
    for _ in range(9):
        tokens = [*tokens, int(logprobs_of(model, tokens)[-1].argmax())]
    found = complete(client)
    assert found.choices[0].text == service.tokenizer.decode(tokens[len(prompt) :])
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (
        len(prompt),
        9,
        len(tokens),
    )
    assert complete(client, prompt=prompt).choices == found.choices


def test_echo_and_logprobs_are_the_models(client: OpenAI, model: Decoder, service: ModelService) -> None:
    choice = complete(client, echo=True, logprobs=3, max_tokens=4, seed=2, temperature=1.5).choices[0]
    told = choice.logprobs
    tokens = service.tokenizer.encode(choice.text)
    expected = logprobs_of(model, tokens)
    assert choice.text.startswith(PROMPT)
    assert "".join(told.tokens) == choice.text
    assert [
        choice.text[at:][: len(text)] for at, text in zip(told.text_offset, told.tokens, strict=True)
    ] == told.tokens
    assert told.token_logprobs[0] is told.top_logprobs[0] is None
    for place in range(1, len(tokens)):
        assert told.token_logprobs[place] == pytest.approx(float(expected[place - 1, tokens[place]]), abs=1e-4)
        assert max(told.top_logprobs[place].values()) == pytest.approx(float(expected[place - 1].max()), abs=1e-4)
        assert 3 <= len(told.top_logprobs[place]) <= 4
        assert told.top_logprobs[place][told.tokens[place]] == told.token_logprobs[place]


def test_an_adapter_is_a_model_of_its_own(
    client: OpenAI, service: ModelService, folder: Path, adapters: dict[str, str]
) -> None:
    """Several at once, in completions, chats and streams; the second call has the prompt's pages in the cache."""
    names = [*adapters, "tiny"] * 2
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(lambda name: complete(client, model=name, logprobs=0), names))
    texts = []
    for name, one in zip(names, found, strict=True):
        merged = load_inference_model(folder, adapter=adapters.get(name))
        tokens = prompt = service.tokenizer.encode(PROMPT)
        for logprob in one.choices[0].logprobs.token_logprobs:
            likely = logprobs_of(merged, tokens)[-1]
            assert logprob == pytest.approx(float(likely.max()), abs=1e-4)
            tokens = [*tokens, int(likely.argmax())]
        assert (one.model, one.usage.completion_tokens) == (name, len(tokens) - len(prompt))
        assert service.tokenizer.decode(tokens[len(prompt) :]).startswith(
            one.choices[0].text
        )  # half a character is no text
        texts.append(one.choices[0].text)
    assert len(set(texts)) == 3
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, model="sql", stream=True))
    assert streamed == texts[0]
    assert chat(client, model="sql").choices[0].message.content != chat(client).choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="`verse` does not exist") as refused:
        complete(client, model="verse")
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize(
    "options", [{}, {"logprobs": 2}, {"echo": True, "logprobs": 0}, {"n": 3, "temperature": 2, "seed": 5}]
)
def test_streamed_completions_are_the_whole_ones(client: OpenAI, options: dict[str, Any]) -> None:
    whole = complete(client, prompt=[PROMPT, "is"], **options)
    chunks = list(
        complete(client, prompt=[PROMPT, "is"], stream=True, stream_options={"include_usage": True}, **options)
    )
    assert chunks[-1].usage == whole.usage
    assert not chunks[-1].choices
    assert not any(chunk.usage for chunk in chunks[:-1])
    for choice in whole.choices:
        parts = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        if choice.logprobs is not None:
            for name, values in choice.logprobs.model_dump().items():
                joined = [value for part in parts for value in part.logprobs.model_dump()[name]]
                assert joined == [pytest.approx(value) for value in values]


def test_streamed_chat_is_the_whole_one(client: OpenAI) -> None:
    options: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 3, "logprobs": True, "top_logprobs": 2}
    whole = chat(client, **options)
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **options)]
    for choice in whole.choices:
        parts = [part for part in chunks if part.index == choice.index]
        assert [part.delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
        assert "".join(part.delta.content for part in parts) == choice.message.content
        assert parts[-1].finish_reason == choice.finish_reason
        told = [one for part in parts for one in part.logprobs.content]
        assert [one.token for one in told] == [one.token for one in choice.logprobs.content]
        assert all(
            len(one.top_logprobs) == 2
            and one.token
            in (bytes(one.bytes).decode(errors="replace"), "".join(f"\\x{byte:02x}" for byte in one.bytes))
            for one in told
        )


@pytest.mark.long
def test_streamed_chats_are_the_whole_ones_whatever_else_is_served(client: OpenAI, service: ModelService) -> None:
    """Each seed whole and streamed among seven others, some of which go away: pages are shared, batches differ."""

    def tokens(seed: int, *, stream: bool) -> list[list[str]]:
        text = "the end of the story " * (seed % 5) + "?"
        options = {"n": 2, "temperature": 1, "seed": seed, "logprobs": True, "max_tokens": 5 + seed % 29}
        answer = chat(client, text, stream=stream, **options)
        if stream and seed % 7 == 0:
            answer.close()
            answer = chat(client, text, stream=stream, **options)
        found: list[list[str]] = [[], []]
        for one in answer if stream else [answer]:
            for choice in one.choices:
                found[choice.index] += [token.token for token in choice.logprobs.content]
        return found

    with ThreadPoolExecutor(8) as pool:
        asked = [(seed, pool.submit(tokens, seed, stream=stream)) for seed in range(150) for stream in (True, False)]
        found = [(seed, answer.result()) for seed, answer in asked]
    assert [streamed for streamed, whole in zip(found[::2], found[1::2], strict=True) if streamed != whole] == []
    until(
        lambda: (
            service.driver.open_requests == 0
            and service.driver.engine.num_free_pages == service.driver.engine.num_pages
        )
    )


def test_chat_is_the_templates_text_continued(client: OpenAI, folder: Path) -> None:
    messages = [{"role": "user", "content": "the end?"}]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    tokens = theirs(text, add_special_tokens=False).input_ids
    url = str(client.base_url).replace("/v1/", "/tokenize")
    told = client.post(url, cast_to=object, body={"messages": messages})
    assert told == {"tokens": tokens, "count": len(tokens), "max_model_len": 256}
    back = client.post(url.replace("/tok", "/detok"), cast_to=object, body={"tokens": tokens})
    assert back == {"prompt": text}
    assert chat(client).choices[0].message.content == complete(client, prompt=text).choices[0].text
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": " end?"}]
    assert chat(client, messages=[{"role": "user", "content": parts}]).choices == chat(client).choices


def test_draws_depend_on_seed_and_choice_alone(client: OpenAI) -> None:
    def texts(**options: Any) -> list[str]:
        return [choice.text for choice in complete(client, temperature=2, **options).choices]

    three = texts(seed=7, n=3)
    assert len(set(three)) == 3
    assert texts(seed=7, n=3, prompt=["is", PROMPT])[3:] == three
    assert texts(seed=7) == three[:1]
    assert texts(seed=8) != three[:1]
    assert texts() != texts()


def test_settings_reach_the_engine(client: OpenAI) -> None:
    free = complete(client, max_tokens=30).choices[0].text
    stop = free[7:9]
    stopped = complete(client, max_tokens=30, stop=[stop, "never"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (free.partition(stop)[0], "stop")
    assert complete(client, max_tokens=30, frequency_penalty=2).choices[0].text != free
    extra = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0}
    assert complete(client, max_tokens=30, temperature=1.5, extra_body=extra).choices[0].text == free


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"model": "other"}, 404, "The model `other` does not exist."),
        ({"prompt": ""}, 400, "prompt must be a text"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1, 100_000]}, 400, "token 100000 of the prompt is outside the model's vocabulary"),
        ({"prompt": "the " * 2000}, 400, "maximum context length is 256 tokens"),
        ({"max_tokens": 255}, 400, "max_tokens is 255; set max_tokens to at most "),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": "9"}, 400, 'max_tokens must be a valid integer; found "9"'),
        ({"logprobs": 21}, 400, "logprobs must be less than or equal to 20; found 21"),
        ({"n": 100}, 400, "at most 64 choices"),
        ({"temperature": -1}, 400, "temperature"),
        ({"stop": ""}, 400, "stop"),
        ({"stream_options": {"include_usage": True}}, 400, "'stream_options' requires 'stream': true"),
        ({"extra_body": {"suffix": "x"}}, 400, "'suffix' is not supported"),
    ],
)  # fmt: skip
def test_bodies_that_cannot_be(client: OpenAI, options: dict[str, Any], status: int, message: str) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        complete(client, **options)
    assert error.value.status_code == status
    assert message in error.value.message
    assert error.value.type == "invalid_request_error"
    assert error.value.request_id
    assert complete(client, max_tokens=1).choices


@pytest.mark.parametrize(
    "options",
    [
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"response_format": {"type": "json_schema"}},
    ],
)
def test_chats_that_cannot_be(client: OpenAI, options: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, **options)


def test_who_may_come_in(client: OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError, match="API key"):
        client.with_options(api_key="sk-other").models.list()
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="is", max_tokens=1, extra_headers={"x-request-id": "mine-7"}
    )
    assert raw.headers["x-request-id"] == "mine-7"


def test_a_client_that_goes_away_frees_its_pages(client: OpenAI, service: ModelService) -> None:
    engine = service.driver.engine
    before = engine.num_free_pages
    stream = complete(client, n=8, max_tokens=200, temperature=2, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert engine.num_free_pages < before
    stream.close()
    until(lambda: engine.num_running == engine.num_waiting == 0)
    assert engine.num_free_pages == before
    assert service.driver.open_requests == 0
    with pytest.raises(openai.APITimeoutError):
        complete(client, n=8, max_tokens=200, temperature=2, timeout=0.02, extra_body={"ignore_eos": True})
    until(lambda: engine.num_running == engine.num_waiting == service.driver.open_requests == 0)
    assert engine.num_free_pages == before


def test_metrics_count(client: OpenAI) -> None:
    def count(name: str) -> float:
        text = client.get(str(client.base_url).replace("/v1/", "/metrics"), cast_to=str)
        (line,) = [line for line in text.splitlines() if line.startswith(name + " ")]
        return float(line.split()[1])

    name = 'mega_tokens_total{kind="completion"}'
    before = count(name)
    complete(client, max_tokens=5, extra_body={"ignore_eos": True})
    assert count(name) == before + 5
    assert count("mega_cache_pages") == count("mega_cache_free_pages") > 0


def test_answers_obey_a_schema(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    answers = chat(client, max_tokens=60, response_format=wanted, temperature=1, seed=1, n=2).choices
    assert {json.loads(answer.message.content)["a"] for answer in answers} <= {1, 2}
    with pytest.raises(openai.BadRequestError, match="grammar"):
        complete(client, extra_body={"grammar": "no grammar at all"})


def test_a_models_own_settings_hold_where_a_request_says_nothing(client: OpenAI, service: ModelService) -> None:
    greedy = complete(client).choices[0].text
    service.default_sampling = {"top_k": 1}
    try:
        assert client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9).choices[0].text == greedy
        other = complete(client, temperature=2, seed=1, extra_body={"top_k": 0}).choices[0].text
        assert other == complete(client, temperature=2, seed=1, extra_body={"top_k": -1}).choices[0].text != greedy
    finally:
        service.default_sampling = {}
