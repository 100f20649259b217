"""Official clients of other APIs and frameworks against one server: anthropic, LiteLLM, LangChain, Open WebUI's calls."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from served_models import STORY, chat_model, engine_for, openai_client, text_model
from serving import Playback, service_of, serving
from tiny_adapters import save_adapter

from mega_common.lora_config import LoraConfig
from mega_data.tokenizer import Tokenizer
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import LoraAdapterSet, load_inference_model
from mega_eval.server.embeddings_api import make_served_embedder
from mega_trainer.parallel.lora_layers import AdapterSelection

KEY = "sk-tiny-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
CALL = '<think>\nA place.\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
THINKING = "{# <think> </think> #}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = chat_model(tmp_path_factory, STORY, max_position=2048)
    (folder / "chat_template.jinja").write_text(THINKING + (folder / "chat_template.jinja").read_text())
    return folder


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters that clients may load."""
    path = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "poems")):
        lora = LoraConfig(rank=2, modules=["q_proj", "o_proj", "up_proj"][seed:])
        save_adapter(path / name, folder, lora, seed=seed)
    return path


@pytest.fixture(scope="module")
def playback(folder: Path) -> Playback:
    return Playback(folder)


@pytest.fixture(scope="module")
def url(folder: Path, adapters: Path, playback: Playback) -> Iterator[str]:
    """`tiny` generates; `said` answers with prepared texts."""
    selection = AdapterSelection([])
    model = load_inference_model(folder)
    engine = InferenceEngine(model, Tokenizer(folder), cache_tokens=4096, batch_size=8, adapters=selection)
    embedder = make_served_embedder(str(folder), model, Tokenizer(folder), selection)
    services = [
        service_of(engine, folder, embedder=embedder, max_length=1024),
        service_of(playback, folder, name="said", max_length=1024),
    ]
    with serving(*services, key=KEY, adapter_folder=adapters) as (url, _):
        yield url


@pytest.fixture(scope="module")
def anthropic_client(url: str) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
TOOL: dict[str, Any] = {"name": "weather", "description": "Weather.", "input_schema": PLACE}


def test_anthropics_client_gets_text_tools_and_reasoning(anthropic_client: Any, playback: Playback) -> None:
    playback.answers += [CALL, CALL, "Sunny.", "Sun"]
    options: dict[str, Any] = {"model": "said", "max_tokens": 200, "tools": [TOOL], "system": "Be the dog."}
    whole = anthropic_client.messages.create(messages=ASK, **options)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    thought, text, use = whole.content
    assert (thought.thinking, text.text, use.name, use.input) == ("A place.", "I look.", "weather", {"place": "Rome"})
    assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("tool_use", None, "assistant")
    with anthropic_client.messages.stream(messages=ASK, **options) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert events[0] == "message_start"
    assert "input_json" in events
    assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
    result = {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "22 degrees"}]}
        ],
    }
    turn = {"role": "assistant", "content": [block.model_dump() for block in whole.content]}
    last = anthropic_client.messages.create(messages=[*ASK, turn, result], **options)
    assert (last.content[0].text, last.stop_reason) == ("Sunny.", "end_turn")
    prompt = playback.prompts[-1]
    assert '{"name": "weather", "arguments": {"place": "Rome"}}' in prompt
    assert "22 degrees" in prompt
    assert "Be the dog." in prompt
    prefill = [*ASK, {"role": "assistant", "content": "It is"}]
    assert anthropic_client.messages.create(messages=prefill, **options).content[0].text == "Sun"
    assert playback.prompts[-1].endswith("It is")


def test_anthropics_client_and_the_engine(anthropic_client: Any, url: str) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}
    answer = anthropic_client.messages.create(messages=ASK, **options)
    chat = {"model": "tiny", "messages": ASK, "max_tokens": 12, "temperature": 0}
    plain = httpx.post(f"{url}/v1/chat/completions", json=chat, headers=HEADERS).json()["choices"][0]["message"]
    assert answer.content[0].text == plain["content"]
    assert answer.stop_reason == "max_tokens"
    stop = answer.content[0].text[2:4]
    stopped = anthropic_client.messages.create(messages=ASK, stop_sequences=["never", stop], **options)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    counted = anthropic_client.messages.count_tokens(model="tiny", messages=ASK, tools=[TOOL])
    assert counted.input_tokens > answer.usage.input_tokens
    called = anthropic_client.messages.create(
        model="tiny", max_tokens=400, messages=ASK, tool_choice={"type": "any"},
        tools=[{**TOOL, "input_schema": {**PLACE, "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "additionalProperties": False}}],
    )  # fmt: skip
    assert called.content[-1].input["place"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"model": "other"}, "NotFoundError", "`other` does not exist"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "BadRequestError", "'web_search_20250305', which is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://x.example/a.png"}}]}]}, "BadRequestError", "this server fetches no addresses"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "!"}}]}]}, "BadRequestError", "is not base64"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "BadRequestError", "tools.0.function.name must match"),
        ({"tool_choice": {"type": "any"}}, "BadRequestError", "requires 'tools'"),
        ({"extra_body": {"temperature": 1000}}, "BadRequestError", "temperature must be less than or equal to 100"),
        ({"tool_choice": {"type": "tool"}}, "BadRequestError", "requires a 'name'"),
        ({"extra_body": {"max_token": 3}}, "BadRequestError", "'max_token' is not a known field"),
    ],
)  # fmt: skip
def test_anthropics_errors(anthropic_client: Any, options: dict[str, Any], kind: str, message: str) -> None:
    anthropic = importlib.import_module("anthropic")
    with pytest.raises(getattr(anthropic, kind)) as error:
        anthropic_client.messages.create(**{"model": "tiny", "max_tokens": 5, "messages": ASK, **options})
    assert error.value.body["type"] == "error"
    assert message in error.value.body["error"]["message"]


def test_anthropics_key(url: str) -> None:
    body = {"model": "tiny", "max_tokens": 3, "messages": ASK}
    refused = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": "sk-other"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    assert httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": KEY}).status_code == 200


def test_openais_responses_with_tools(url: str, playback: Playback) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": PLACE, "strict": False}
    with openai_client(url, KEY) as client:
        playback.answers += [CALL, CALL, "Sunny."]
        whole = client.responses.create(model="said", input="Weather?", tools=[tool])
        reasoning, message, call = whole.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "A place.")
        assert (message.content[0].text, call.name, json.loads(call.arguments)) == (
            "I look.",
            "weather",
            {"place": "Rome"},
        )
        with client.responses.stream(model="said", input="Weather?", tools=[tool]) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_response()
        assert [item.type for item in streamed.output] == ["reasoning", "message", "function_call"]
        assert streamed.output[2].arguments == call.arguments
        assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= set(kinds)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
        turns: Any = [
            {"role": "user", "content": "Weather?"},
            *(item.model_dump(exclude_none=True) for item in whole.output),
            result,
        ]
        assert client.responses.create(model="said", input=turns, tools=[tool]).output_text == "Sunny."
        assert '{"name": "weather", "arguments": {"place": "Rome"}}' in playback.prompts[-1]
        assert "22 degrees" in playback.prompts[-1]


def test_litellm(url: str, playback: Playback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    tool = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
    how: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": KEY, "messages": ASK, "tools": [tool]}
    playback.answers += [CALL, CALL]
    answer = litellm.completion(model="hosted_vllm/said", **how).choices[0]
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"place": "Rome"}
    assert (answer.message.content, answer.message.reasoning_content) == ("I look.", "A place.")
    chunks = list(litellm.completion(model="openai/said", stream=True, **how))
    whole = litellm.stream_chunk_builder(chunks, messages=ASK).choices[0]
    assert whole.message.tool_calls[0].function.arguments == '{"place": "Rome"}'
    vectors = litellm.embedding(model="openai/tiny", input=["a", "b"], api_base=f"{url}/v1", api_key=KEY)
    assert len(vectors.data) == 2


def test_langchain(url: str, playback: Playback) -> None:
    langchain = pytest.importorskip("langchain_openai")
    tool = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
    model = langchain.ChatOpenAI(model="said", base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    playback.answers += [CALL, CALL, "Sunny."]
    answer = model.bind_tools([tool]).invoke([("user", "Weather?")])
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"place": "Rome"})]
    parts = list(model.bind_tools([tool]).stream([("user", "Weather?")]))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("weather", {"place": "Rome"})]
    from langchain_core.messages import HumanMessage, ToolMessage

    result = ToolMessage("22 degrees", tool_call_id=answer.tool_calls[0]["id"])
    assert model.bind_tools([tool]).invoke([HumanMessage("Weather?"), answer, result]).content == "Sunny."
    schema = {
        "title": "Place",
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    }
    tiny = langchain.ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key=KEY, max_retries=0, max_tokens=300, seed=1)
    for method in ("json_schema", "function_calling"):
        assert tiny.with_structured_output(schema, method=method).invoke("Weather?")["place"] in ("Rome", "Oslo")
    embeddings = langchain.OpenAIEmbeddings(
        model="tiny", base_url=f"{url}/v1", api_key=KEY, check_embedding_ctx_length=False
    )
    assert len(embeddings.embed_documents(["a", "b"])) == 2


def test_open_webuis_calls(url: str, playback: Playback) -> None:
    """Its requests to an OpenAI-compatible server: models, chats with its fields, titles, embeddings, reranking."""
    assert [model["id"] for model in httpx.get(f"{url}/v1/models", headers=HEADERS).json()["data"]] == ["tiny", "said"]
    playback.answers += ["Hello.", '{"title": "A greeting"}']
    chat = {
        "stream": True, "model": "said", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "params": None, "stream_options": {"include_usage": True}, "metadata": {"chat_id": "1"}, "seed": 1, "stop": ["###"],
        "temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"5": -1},
        "max_tokens": 50, "tools": [],
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=chat, headers=HEADERS)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert "".join(part["delta"]["content"] for chunk in chunks for part in chunk["choices"]) == "Hello."
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    title = {"model": "said", "messages": ASK, "stream": False, "max_completion_tokens": 500}
    found = httpx.post(f"{url}/v1/chat/completions", json=title, headers=HEADERS).json()
    assert json.loads(found["choices"][0]["message"]["content"])["title"] == "A greeting"
    vectors = httpx.post(f"{url}/v1/embeddings", json={"input": ["a", "b"], "model": "tiny"}, headers=HEADERS).json()
    assert [len(one["embedding"]) for one in vectors["data"]] == [len(vectors["data"][0]["embedding"])] * 2
    ranked = httpx.post(
        f"{url}/v1/rerank", json={"model": "tiny", "query": "a", "documents": ["b", "a"], "top_n": 2}, headers=HEADERS
    ).json()
    assert [sorted(result) for result in ranked["results"]] == [["document", "index", "relevance_score"]] * 2


def test_documents_are_ranked_by_their_vectors(url: str) -> None:
    def post(path: str, **body: Any) -> Any:
        answer = httpx.post(f"{url}/v1/{path}", json={"model": "tiny", **body}, headers=HEADERS)
        assert answer.status_code == 200, answer.text
        return answer.json()

    texts = ["the story", "is the end", "of the other story", "the end"]
    vectors = np.array([one["embedding"] for one in post("embeddings", input=[*texts, "the end"])["data"]])
    scores = vectors[:4] @ vectors[4]
    ranked = post("rerank", query="the end", documents=texts)["results"]
    assert [one["index"] for one in ranked] == list(np.argsort(-scores, kind="stable"))
    assert ranked[0]["index"] == 3
    assert [one["relevance_score"] for one in ranked] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    top = post("rerank", query="the end", documents=[{"text": text} for text in texts], top_n=1, return_documents=False)
    assert [sorted(one) for one in top["results"]] == [["index", "relevance_score"]]
    refused = httpx.post(f"{url}/v1/rerank", json={"query": "a", "documents": []}, headers=HEADERS)
    assert (refused.status_code, "documents must be a list" in refused.text) == (400, True)


def test_adapters_come_and_go(url: str, folder: Path, adapters: Path) -> None:
    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{url}/v1/{path}", json=body, headers=HEADERS)

    def say(model: str) -> list[float]:
        body = {"model": model, "prompt": "the story of", "max_tokens": 8, "temperature": 0, "logprobs": 0}
        answer = post("completions", **body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["logprobs"]["token_logprobs"])

    beside = LoraAdapterSet.open_adapters(folder, {name: str(adapters / name) for name in ("sql", "poems")})
    model = load_inference_model(folder, lora_adapters=beside)
    engine = InferenceEngine(model, Tokenizer(folder), cache_tokens=2048, batch_size=8, adapters=beside.pool.selection)
    with serving(service_of(engine, folder, adapters={"sql": "sql", "poems": "poems"})) as (other, _):
        body = {"prompt": "the story of", "max_tokens": 8, "temperature": 0, "logprobs": 0}
        expected = {
            name: httpx.post(f"{other}/v1/completions", json={"model": name, **body}).json()["choices"][0]["logprobs"]["token_logprobs"]
            for name in ("tiny", "sql", "poems")
        }  # fmt: skip
    assert say("tiny") == pytest.approx(expected["tiny"], abs=1e-5)
    for name in ("sql", "poems"):
        assert post("load_lora_adapter", lora_name=name, lora_path=name).status_code == 200
        assert say(name) == pytest.approx(expected[name], abs=1e-5)
    assert say("tiny") == pytest.approx(expected["tiny"], abs=1e-5)
    assert post("load_lora_adapter", lora_name="sql", lora_path="poems").status_code == 400
    with ThreadPoolExecutor(4) as pool:  # at the same time: one is loaded, and can be unloaded
        loads = pool.map(lambda _: post("load_lora_adapter", lora_name="two", lora_path="poems").status_code, range(4))
        assert sorted(loads) == [200, 400, 400, 400]
    assert post("unload_lora_adapter", lora_name="two").status_code == 200
    assert post("unload_lora_adapter", lora_name="sql").status_code == 200
    assert post("completions", model="sql", prompt="a").status_code == 404
    assert post("load_lora_adapter", lora_name="sql", lora_path=str(adapters / "poems")).status_code == 200
    assert say("sql") == pytest.approx(expected["poems"], abs=1e-5)  # no keys and values of the first `sql`
    for name in ("sql", "poems"):
        assert post("unload_lora_adapter", lora_name=name).status_code == 200
    assert say("tiny") == pytest.approx(expected["tiny"], abs=1e-5)
    assert post("unload_lora_adapter", lora_name="sql").status_code == 404
    for path in ("..", "/etc", "missing"):
        assert post("load_lora_adapter", lora_name="x", lora_path=path).status_code == 404
    assert post("load_lora_adapter", lora_name="x", lora_path=".").status_code == 400


def test_adapters_are_not_loaded_unless_the_server_allows_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = text_model(tmp_path_factory)
    with serving(service_of(engine_for(folder), folder)) as (url, _):
        answer = httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/"})
        assert (answer.status_code, "--adapter-folder" in answer.text) == (403, True)
