"""Endpoints that usual clients ask for: the Responses API, embeddings, tokenizers and pages of other origins."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest
from openai import OpenAI
from served_models import STORY, chat_model, openai_client
from serving import service_of, serving
from tiny_adapters import save_adapter

from mega_common.lora_config import LoraConfig
from mega_data.tokenizer import Tokenizer
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import LoraAdapterSet, load_inference_model
from mega_eval.server.embeddings_api import make_served_embedder
from mega_eval.server.model_service import ModelService
from mega_eval.text_embedding import compute_embeddings

ORIGIN = "https://chat.example"
KEY = "sk-tiny-key"
TEXTS = ["the end", "of the story", "🎉"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory, f"{STORY} 🎉 naïve")


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelService:
    lora = LoraConfig(rank=2, modules=["q_proj", "o_proj"])
    adapters = {"poems": str(save_adapter(tmp_path_factory.mktemp("adapters") / "poems", folder, lora, seed=0))}
    beside = LoraAdapterSet.open_adapters(folder, adapters)
    model, selection = load_inference_model(folder, lora_adapters=beside), beside.pool.selection
    engine = InferenceEngine(model, Tokenizer(folder), cache_tokens=2048, batch_size=8, adapters=selection)
    return service_of(
        engine,
        folder,
        adapters=adapters,
        embedder=make_served_embedder(str(folder), model, Tokenizer(folder), selection),
    )


@pytest.fixture(scope="module")
def url(service: ModelService) -> Iterator[str]:
    with serving(service, key=KEY, origins=(ORIGIN,)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with openai_client(url, KEY) as client:
        yield client


def respond(client: OpenAI, **options: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": "the end?", "temperature": 0, "max_output_tokens": 9, **options})  # fmt: skip


def chat(client: OpenAI, messages: list[dict[str, Any]], **options: Any) -> str:
    given: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 9, **options}
    return str(client.chat.completions.create(**given).choices[0].message.content)


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({}, [("user", "the end?")]),
        ({"instructions": "the story"}, [("system", "the story"), ("user", "the end?")]),
        ({"input": [{"role": "user", "content": "is"}]}, [("user", "is")]),
        ({"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "is"}]}]}, [("user", "is")]),
        ({"input": [{"role": "user", "content": "is"}, {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "the", "annotations": []}]}, {"role": "user", "content": "end"}]}, [("user", "is"), ("assistant", "the"), ("user", "end")]),
        ({"model": "poems"}, [("user", "the end?")]),
    ],
)  # fmt: skip
def test_responses_are_chats(client: OpenAI, options: dict[str, Any], messages: list[tuple[str, str]]) -> None:
    whole = respond(client, **options)
    more = {"model": options["model"]} if "model" in options else {}
    assert whole.output_text == chat(client, [{"role": role, "content": text} for role, text in messages], **more)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.usage.output_tokens == 9
    assert whole.usage.total_tokens == whole.usage.input_tokens + 9
    events = list(respond(client, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1].response
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert (last.output_text, last.usage) == (whole.output_text, whole.usage)


def test_the_clients_own_accumulation_of_a_stream(client: OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "one", "schema": {"enum": ["🎉 naïve"]}}}
    with client.responses.stream(model="tiny", input="the end?", temperature=0, text=text) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == '"🎉 naïve"'
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]  # fmt: skip


def test_responses_obey_a_schema(client: OpenAI) -> None:
    schema = {"type": "json_schema", "name": "one", "schema": {"enum": [7]}, "strict": True}
    found = respond(client, text={"format": schema}, max_output_tokens=60)
    assert (found.output_text, found.status) == ("7", "completed")
    assert found.text.format.name == "one"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type must be 'function'"),
        ({"tool_choice": "any"}, "tool_choice must be"),
        ({"previous_response_id": "resp_1"}, "'previous_response_id' is not supported"),
        ({"conversation": "conv_1"}, "'conversation' is not supported"),
        ({"background": True}, "'background' is not supported"),
        ({"include": ["reasoning.encrypted_content"]}, "'include' is not supported"),
        ({"truncation": "auto"}, "'truncation' is not supported"),
        ({"reasoning": {"effort": "high"}}, "'reasoning' is not supported"),
        ({"prompt": {"id": "pmpt_1"}}, "'prompt' is not a known field"),
        ({"max_output_tokens": 0}, "max_output_tokens must be greater than or equal to 1"),
        ({"input": [{"type": "computer_call"}]}, "input.0 has type 'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0 must have an image as 'data:"),
        ({"input": []}, "input must have at least 1 item"),
        ({"input": 3}, "input must be a text or a list of messages"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "'schema' is required"),
        ({"text": {"verbosity": "low"}}, "text: 'verbosity' is not supported"),
    ],
)  # fmt: skip
def test_responses_that_cannot_be(client: OpenAI, options: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        respond(client, **options)
    assert message in error.value.message
    assert error.value.message.count(";") <= 2


@pytest.mark.parametrize(
    "extra", [{"metadata": {"a": "b"}}, {"store": True}, {"truncation": "disabled"}, {"tools": []}]
)
def test_harmless_fields_of_responses(client: OpenAI, extra: dict[str, Any]) -> None:
    assert respond(client, **extra).output_text == respond(client).output_text


def test_embeddings_are_those_of_the_command(client: OpenAI, folder: Path, service: ModelService) -> None:
    tokens = [service.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    expected = compute_embeddings(load_inference_model(folder), tokens, normalize=True, advance=lambda _: None)
    for given in (TEXTS, tokens):
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found: Any = client.embeddings.create(model="tiny", input=given, **options)  # type: ignore[arg-type]
            vectors = [one.embedding for one in found.data]
            if options.get("encoding_format") == "base64":
                vectors = [np.frombuffer(base64.b64decode(one), "<f4") for one in vectors]
            np.testing.assert_allclose(np.array(vectors), expected, atol=1e-5)
            assert found.usage.prompt_tokens == sum(map(len, tokens))
            assert [one.index for one in found.data] == [0, 1, 2]
    many: Any = client.embeddings.create(model="tiny", input=[f"{TEXTS[at % 3]} " * 40 for at in range(60)])
    np.testing.assert_allclose(many.data[0].embedding, many.data[57].embedding, atol=1e-5)


def test_embeddings_after_an_adapter_are_without_it(client: OpenAI) -> None:
    before: Any = client.embeddings.create(model="tiny", input="the end")
    assert chat(client, [{"role": "user", "content": "is"}], model="poems")
    after: Any = client.embeddings.create(model="tiny", input="the end")
    assert before.data == after.data


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": []}, "input must be a text, a list of texts"),
        ({"input": ["a", [1]]}, "found a list that mixes lists and texts"),
        ({"input": ""}, "input must be a text"),
        ({"input": ["the", ""]}, "input must not have an empty text"),
        ({"input": [[]]}, "input must not have an empty text"),
        ({"input": [99999]}, "input has token 99999, which is outside"),
        ({"input": "the " * 900}, "maximum context length"),
        ({"input": "a", "dimensions": 3}, "dimensions must be"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format must be 'float' or 'base64'"),
        ({"input": "a", "pooling": "max"}, "'pooling' is not a known field"),
        ({"input": "a", "model": "poems"}, "without an adapter"),
    ],
)
def test_embeddings_that_cannot_be(url: str, options: dict[str, Any], message: str) -> None:
    answer = httpx.post(f"{url}/v1/embeddings", json=options, headers={"authorization": f"bearer {KEY}"})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_server_without_embeddings_says_so(client: OpenAI, service: ModelService) -> None:
    kept, service.embedder = service.embedder, None
    try:
        with pytest.raises(openai.BadRequestError, match="embeddings are supported for"):
            client.embeddings.create(model="tiny", input="a")
    finally:
        service.embedder = kept


def test_the_remote_tokenizer_of_lm_eval(url: str, service: ModelService) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    remote = utils.RemoteTokenizer(f"{url}/v1/completions", auth_token=KEY, max_retries=1)
    assert remote.eos_token == service.tokenizer.eos_token
    assert remote.eos_token_id == service.tokenizer.eos_id
    assert remote.encode("the end 🎉") == service.tokenizer.encode("the end 🎉")
    assert remote.decode(remote.encode("the end 🎉")) == "the end 🎉"
    messages = [{"role": "user", "content": "the end?"}]
    answer = httpx.post(f"{url}/tokenize", json={"messages": messages, "return_token_strs": True}, headers={"authorization": f"Bearer {KEY}"}).json()  # fmt: skip
    rendered = remote.apply_chat_template(messages, tools=None).rstrip()  # its Jinja keeps the last newline
    assert rendered == remote.decode(answer["tokens"]).rstrip()
    assert answer["token_strs"] == [service.tokenizer.backend.id_to_token(token) for token in answer["tokens"]]


def test_pages_of_the_named_origins_may_call(url: str, service: ModelService) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for origin, allowed in ((ORIGIN, True), ("https://other.example", False)):
        early = httpx.options(f"{url}/v1/chat/completions", headers={"origin": origin, **ask})
        assert (early.headers.get("access-control-allow-origin") == origin) is allowed
        listed = httpx.get(f"{url}/v1/models/", headers={"origin": origin, "authorization": f"Bearer {KEY}"})
        assert listed.json()["data"][0]["id"] == "tiny"
        assert (listed.headers.get("access-control-allow-origin") == origin) is allowed
        refused = httpx.get(f"{url}/v1/models", headers={"origin": origin})
        assert refused.status_code == 401
        assert (refused.headers.get("access-control-allow-origin") == origin) is allowed
    with serving(service_of(service.driver.engine, service.tokenizer.path.parent)) as (closed, _):
        answer = httpx.get(f"{closed}/v1/models", headers={"origin": ORIGIN})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/v1/chat/completion", 404, "no path /v1/chat/completion; did you mean /v1/chat/completions?"),
        ("POST", "/zzz", 404, "no path /zzz; use "),
        ("GET", "/v1/completions", 405, "GET /v1/completions is not supported; use POST"),
    ],
)
def test_unknown_paths_and_methods_name_the_supported_ones(
    url: str, method: str, path: str, status: int, message: str
) -> None:
    answer = httpx.request(method, url.removesuffix("/v1") + path, json={}, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
