"""Request fields of other servers: each is implemented, refused by name, or harmless."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import torch
from chat_templates import chat_tokenizer
from serving import service_of, serving
from tiny_models import save_tiny, variant
from torch import Tensor

from mega_ckpt.families import find_family_by_name
from mega_common.extension_entries import Sampler
from mega_common.strict_config import StrictConfig
from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import load_inference_model
from mega_eval.server.model_service import ModelService
from mega_eval.server.request_schemas import ChatRequest, CompletionRequest
from mega_eval.server.request_validation import HARMLESS, REFUSED

CHAT = {"messages": [{"role": "user", "content": "the end?"}], "temperature": 0, "max_tokens": 12}
TEXT = {"prompt": "the story of", "temperature": 0, "max_tokens": 12}

# Fields of the request classes of vLLM, SGLang, llama.cpp and openai that this server has to know by name.
KNOWN = """
    messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n presence_penalty
    response_format seed stop stream stream_options temperature top_p tools tool_choice reasoning_effort
    parallel_tool_calls user best_of use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words echo suffix add_generation_prompt
    continue_final_message add_special_tokens documents chat_template chat_template_kwargs structured_outputs
    guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
    structural_tag priority request_id logits_processors return_token_ids return_tokens_as_token_ids cache_salt
    kv_transfer_params vllm_xargs regex ebnf json_schema stop_regex no_stop_trim lora_path session_params rid
    return_hidden_states custom_logit_processor grammar n_predict n_probs repeat_penalty repeat_last_n typical_p
    mirostat mirostat_tau mirostat_eta dynatemp_range xtc_probability dry_multiplier samplers cache_prompt
    audio functions function_call metadata modalities prediction prompt_cache_key safety_identifier service_tier store
    verbosity web_search_options
"""


class TakenToken(StrictConfig):
    token: int


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> ModelService:
    base, folder = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("model")
    train_tokenizer(["the end of the story is the beginning of the other story 🎉 naïve"] * 3, 290, base)
    tokenizer = Tokenizer(chat_tokenizer(base, folder, "qwen", marks=False))
    config = variant("grouped").model_copy(update={"vocab_size": tokenizer.vocab_size, "max_position": 512})
    save_tiny(folder, find_family_by_name("llama"), config)
    return service_of(
        InferenceEngine(load_inference_model(folder), Tokenizer(folder), cache_tokens=2048, batch_size=8), folder
    )


@pytest.fixture(scope="module")
def client(service: ModelService) -> Iterator[httpx.Client]:
    with serving(service) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield client


def post_request(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chat(client: httpx.Client, **more: Any) -> dict[str, Any]:
    return post_request(client, "/v1/chat/completions", {**CHAT, **more})["choices"][0]


def complete(client: httpx.Client, **more: Any) -> dict[str, Any]:
    return post_request(client, "/v1/completions", {**TEXT, **more})["choices"][0]


def refusal(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize("name", KNOWN.split())
def test_every_field_of_other_servers_has_a_place(name: str) -> None:
    declared = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert sum([name in declared, name in REFUSED, name in HARMLESS]) == 1


def test_tables_do_not_overlap() -> None:
    declared = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert not declared & HARMLESS
    assert not declared & REFUSED.keys()
    assert not HARMLESS & REFUSED.keys()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused_fields_are_named(client: httpx.Client, name: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        error = refusal(client, path, {**body, name: "any value"})
        assert error["message"].startswith(f"'{name}' is not supported by this server; ")
        assert error["param"] == name
        for neutral in (None, *REFUSED[name].neutral):
            assert client.post(path, json={**body, "max_tokens": 1, name: neutral}).status_code == 200


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_harmless_fields_are_accepted(client: httpx.Client, name: str) -> None:
    assert chat(client, **{name: "any value"}) == chat(client)


@pytest.mark.parametrize(
    ("name", "fix"),
    [("temprature", "use 'temperature'"), ("max_token", "use 'max_tokens'"), ("zzz", "remove it"), ("x" * 500, "remove it")],
)  # fmt: skip
def test_unknown_fields_are_refused(client: httpx.Client, name: str, fix: str) -> None:
    error = refusal(client, "/v1/completions", {**TEXT, name: 1})
    assert error["message"] == f"'{name[:80]}' is not a known field; {fix}"


def test_a_misspelled_required_field_is_named(client: httpx.Client) -> None:
    assert refusal(client, "/v1/completions", {"promt": "a"})["message"] == "prompt is required; found 'promt'"
    assert refusal(client, "/v1/completions", {"x": "a"})["message"] == "prompt is required"


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "a/b[0-9]{2}\n"}}, "a/b[0-9]{2}\n"),
        ({"structured_outputs": {"json": {"enum": [7]}}}, "7"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]'}}, "x[0-9]"),
        ({"structured_outputs": {"json_object": True}}, r"\{(.|\n)*"),
        ({"guided_json": {"enum": ["a"]}}, '"a"'),
        ({"guided_json": '{"enum": ["a"]}'}, '"a"'),
        ({"guided_choice": ['a "b"', "c\nd", "é/"]}, 'a "b"|c\nd|é/'),
        ({"guided_regex": "(ab)+c"}, "(ab)*.*"),
        ({"guided_regex": r"\d\/\d"}, r"\d/\d"),
        ({"guided_grammar": 'start: "y" | "z"'}, "y|z"),
        ({"grammar": 'root ::= "y" | "z"'}, "y|z"),
        ({"grammar": '{"enum": [12]}'}, "12"),
        ({"response_format": {"type": "json_object", "schema": {"enum": [3]}}}, "3"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [3]}}}}, "3"),
    ],
)
def test_constraints_are_obeyed(client: httpx.Client, field: dict[str, Any], pattern: str) -> None:
    for text in (complete(client, **field)["text"], chat(client, **field)["message"]["content"]):
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "at most one of"),
        ({"grammar": 'start: "a"', "response_format": {"type": "json_object"}}, "at most one of"),
        ({"structured_outputs": {}}, "must have exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "must have exactly one of"),
        ({"structured_outputs": {"regexp": "a"}}, "'regexp' is not a known field; use 'regex'"),
        ({"guided_json": "{"}, "is not JSON"),
        ({"guided_json": "[]"}, "must be an object"),
        ({"guided_grammar": 'root ::= ("a"'}, "GBNF grammar cannot be read"),
        ({"guided_grammar": "root ::= " + "(" * 5000}, "GBNF grammar cannot be read"),
        ({"guided_grammar": "root ::=" + "\n " * 9000 + "("}, "GBNF grammar cannot be read"),
        ({"guided_regex": "("}, "guided_regex cannot be used (line 1, column"),
        ({"guided_json": {"type": "strng"}}, "guided_json cannot be used (Invalid type: strng"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "min_tokens": 2}, "'min_tokens' is not supported with a grammar"),
        ({"guided_choice": ["a"], "allowed_token_ids": [2]}, "'allowed_token_ids' is not supported with a grammar"),
        ({"response_format": {"type": "json_object", "value": {}}}, "response_format: 'value' is not a known field"),
        ({"response_format": {"type": "text", "schema": {}}}, "'schema' is supported with type 'json_object' only"),
        ({"response_format": {"type": "json_schema"}}, "'json_schema' is required with type 'json_schema'"),
        ({"stream": True, "stream_options": {"include_use": True}}, "use 'include_usage'"),
        ({"min_tokens": 13}, "min_tokens (13) must be at most the maximum of 12 tokens"),
        ({"stop_token_ids": [99999]}, "stop_token_ids has token 99999, which is outside"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids has token 99999, which is outside"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": {"99999": 1}}, "logit_bias has token 99999, which is outside"),
        ({"logit_bias": {"the": 1}}, "logit_bias must have token ids as keys; found 'the'"),
        ({"logit_bias": {"1": 101}}, "less than or equal to 100"),
        ({"bad_words": ["a"], "allowed_token_ids": [2]}, "'bad_words' is not supported with 'allowed_token_ids'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or at least 1; found 0"),
        ({"best_of": 2}, "'best_of' must be equal to 'n'"),
        ({"stop": ["ends<|im_end|>"]}, "stop mixes the special token '<|im_end|>' with other text"),
    ],
)
def test_constraints_that_cannot_be(client: httpx.Client, fields: dict[str, Any], message: str) -> None:
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        assert message in refusal(client, path, {**body, **fields})["message"]


def tokens_of(client: httpx.Client, service: ModelService, **more: Any) -> list[int]:
    """Token ids of a greedy completion, by their bytes."""
    answer = post_request(client, "/v1/chat/completions", {**CHAT, "logprobs": True, "ignore_eos": True, **more})
    by_bytes = {service.vocabulary[token].raw: token for token in range(service.vocab_size)}
    return [by_bytes[bytes(one["bytes"])] for one in answer["choices"][0]["logprobs"]["content"]]


def test_stop_tokens_end_the_text(client: httpx.Client, service: ModelService) -> None:
    free = tokens_of(client, service)
    stop = free[4]
    first = free.index(stop)
    stopped = chat(client, stop_token_ids=[stop], ignore_eos=True)
    assert stopped["finish_reason"] == "stop"
    assert tokens_of(client, service, stop_token_ids=[stop]) == free[: first + 1]
    assert stopped["message"]["content"] == service.tokenizer.decode(free[:first]).rstrip("\ufffd")
    kept = chat(client, stop_token_ids=[stop], ignore_eos=True, include_stop_str_in_output=True)
    assert kept["message"]["content"] == service.tokenizer.decode(free[: first + 1]).rstrip("\ufffd")
    late = tokens_of(client, service, stop_token_ids=[stop], min_tokens=first + 3)
    assert len(late) > first + 3 or late[first] != stop


def test_stop_strings_can_stay(client: httpx.Client) -> None:
    free = complete(client, max_tokens=30)["text"]
    stop = free[7:9]
    kept = complete(client, max_tokens=30, stop=stop, include_stop_str_in_output=True)
    assert (kept["text"], kept["finish_reason"]) == (free[: free.index(stop) + len(stop)], "stop")
    assert len(complete(client, max_tokens=30, stop=stop, min_tokens=29)["text"]) > len(kept["text"])


def test_a_special_token_is_a_stop_string(client: httpx.Client, service: ModelService) -> None:
    special = service.vocabulary.specials["<|im_start|>"]
    force = {"logit_bias": {str(special): 100}, "ignore_eos": True}
    assert chat(client, **force)["finish_reason"] == "length"
    assert chat(client, **force)["message"]["content"] == ""
    stopped = post_request(client, "/v1/chat/completions", {**CHAT, **force, "stop": ["never", "<|im_start|>"]})
    assert (stopped["choices"][0]["finish_reason"], stopped["usage"]["completion_tokens"]) == ("stop", 1)
    assert chat(client, **force, skip_special_tokens=False)["message"]["content"] == "<|im_start|>" * 12
    shown = chat(client, **force, skip_special_tokens=False, stop="start|><|im")
    assert (shown["message"]["content"], shown["finish_reason"]) == ("<|im_", "stop")


def test_tokens_are_allowed_biased_and_banned(client: httpx.Client, service: ModelService) -> None:
    free = tokens_of(client, service)
    assert set(tokens_of(client, service, allowed_token_ids=[70, 71])) <= {70, 71}
    assert set(tokens_of(client, service, allowed_token_ids=[70, 71], temperature=1.0)) <= {70, 71}
    assert set(tokens_of(client, service, logit_bias={"75": 100})) == {75}
    assert free[0] not in tokens_of(client, service, logit_bias={str(free[0]): -100})
    letter = next(chr(byte) for byte in range(97, 123) if service.tokenizer.encode(chr(byte)) != [])
    (token,) = service.tokenizer.encode(letter)
    forced = {"logit_bias": {str(token): 50}}
    assert set(tokens_of(client, service, **forced)) == {token}
    assert token not in tokens_of(client, service, **forced, bad_words=[letter])
    with_pairs = tokens_of(client, service, **forced, bad_words=[letter * 2])
    pair = service.tokenizer.encode(letter * 2)
    assert pair not in [with_pairs[at : at + len(pair)] for at in range(12)]


def test_a_request_names_a_sampler_of_an_extension(client: httpx.Client, service: ModelService) -> None:
    def take_token(scores: Tensor, prompt: list[int], generated: list[int], *, options: TakenToken) -> Tensor:
        return scores.index_fill(0, torch.tensor([options.token]), 1e9)

    service.samplers = {"take_token": Sampler(take_token, TakenToken)}
    found = complete(client, sampler="take_token", sampler_options={"token": 70}, max_tokens=3, ignore_eos=True)
    assert found["text"] == service.tokenizer.decode([70] * 3)
    for more, words in (
        ({"sampler": "none"}, "not a sampler of a loaded extension; use one of take_token"),
        ({"sampler": "take_token", "sampler_options": {"tokens": 1}}, "tokens: unknown key"),
    ):
        error = refusal(client, "/v1/completions", {**TEXT, **more})
        assert error["param"] == "sampler"
        assert words in error["message"]


def test_a_minimum_of_tokens_requires_an_allowed_token_that_does_not_end_the_text(
    client: httpx.Client, service: ModelService
) -> None:
    end = next(iter(service.ends))
    body = {**CHAT, "allowed_token_ids": [end], "min_tokens": 3}
    assert "min_tokens requires an allowed token" in refusal(client, "/v1/chat/completions", body)["message"]
    body = {**CHAT, "allowed_token_ids": [70], "stop_token_ids": [70], "min_tokens": 3}
    assert "min_tokens requires an allowed token" in refusal(client, "/v1/chat/completions", body)["message"]
    assert chat(client)


def test_a_minimum_of_tokens_keeps_the_end_away(client: httpx.Client, service: ModelService) -> None:
    force = {"logit_bias": {str(end): 100 for end in service.ends}}
    usage = [
        post_request(client, "/v1/chat/completions", {**CHAT, **force, "min_tokens": least})["usage"][
            "completion_tokens"
        ]
        for least in (0, 1, 5, 12)
    ]
    assert usage == [1, 2, 6, 12]


def test_a_conversation_is_continued_or_only_rendered(client: httpx.Client) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "the story is"}]

    def text(**how: Any) -> str:
        tokens = post_request(client, "/tokenize", {"messages": messages, **how})["tokens"]
        return str(post_request(client, "/detokenize", {"tokens": tokens})["prompt"])

    assert text(continue_final_message=True).endswith("the story is")
    assert text(add_generation_prompt=False).rstrip().endswith("<|im_end|>")
    assert text().rstrip().endswith("assistant")
    going_on = chat(client, messages=messages, continue_final_message=True)["message"]["content"]
    assert going_on == complete(client, prompt=text(continue_final_message=True))["text"]
    both = {**CHAT, "messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert "set one of them" in refusal(client, "/v1/chat/completions", both)["message"]
    prefix = {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "a", "prefix": True}]}
    assert "use 'continue_final_message'" in refusal(client, "/v1/chat/completions", prefix)["message"]


def test_prompts_are_cut_at_their_start(client: httpx.Client, service: ModelService) -> None:
    tokens = service.tokenizer.encode("the end of the story is the beginning")
    cut = {"prompt": tokens, "truncate_prompt_tokens": 3, "echo": True}
    assert complete(client, **cut) == complete(client, prompt=tokens[-3:], echo=True)
    assert complete(client, prompt="the " * 900, truncate_prompt_tokens=-1)["finish_reason"] in ("length", "stop")
    assert chat(client, truncate_prompt_tokens=5)["message"]["content"]


def test_an_echo_alone_scores_the_prompt(client: httpx.Client) -> None:
    for stream in (False, True):
        body = {**TEXT, "max_tokens": 0, "echo": True, "logprobs": 1, "n": 2}
        if stream:
            lines = client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
            choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        else:
            answer = post_request(client, "/v1/completions", body)
            assert answer["usage"]["completion_tokens"] == 0
            choices = answer["choices"]
        assert [choice["text"] for choice in choices] == [TEXT["prompt"]] * 2
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
        longer = complete(client, echo=True, logprobs=1, max_tokens=1)["logprobs"]
        assert choices[0]["logprobs"]["tokens"] == longer["tokens"][:-1]
        assert choices[0]["logprobs"]["token_logprobs"] == pytest.approx(longer["token_logprobs"][:-1], abs=1e-4)
    assert "or 0 with 'echo'" in refusal(client, "/v1/completions", {**TEXT, "max_tokens": 0})["message"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/", {"messages": [{"role": "user", "content": [IMAGE]}]}, "this model takes no images"),
        ("chat/", {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages.0.content.0 must have its text in 'text'"),
        ("chat/", {"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0 must be an object with 'type' and 'text'"),
        ("chat/", {"messages": [{"role": "user", "content": 3}]}, "messages.0.content must be a text or a list of parts of type 'text'"),
        ("chat/", {"messages": [{"role": "user", "content": {"type": "text"}}]}, "messages.0.content must be a text or a list of parts of type 'text'"),
        ("chat/", {"messages": [{"content": "a"}]}, "messages.0.role is required"),
        ("chat/", {"messages": "a"}, 'messages must be a valid list; found "a"'),
        ("chat/", {"messages": [{"role": "robot", "content": "a"}]}, """messages.0.role must be 'system', 'developer', 'user', 'assistant' or 'tool'; found "robot\""""),
        ("chat/", {"response_format": "json"}, "response_format must be "),
        ("chat/", {"response_format": {"type": "xml"}}, """response_format.type must be 'text', 'json_object' or 'json_schema'; found "xml\""""),
        ("chat/", {"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs must not have 'add_generation_prompt'"),
        ("chat/", {"tool_choice": ["auto"]}, "found a list of texts"),
        ("", {"prompt": ["a", [1, 2]]}, "found a list that mixes lists and texts"),
        ("", {"prompt": [1, "a"]}, "found a list that mixes numbers and texts"),
        ("", {"prompt": [True]}, "found a list of booleans"),
        ("", {"prompt": [1.5]}, "found a list of numbers"),
        ("", {"prompt": {}}, "found an object"),
        ("", {"prompt": []}, "found an empty list"),
        ("", {"prompt": None}, "found null"),
        ("", {"stop": 3}, "stop must be a text or a list of at most 16 texts, each of 1 to 1000 characters; found 3"),
        ("", {"stop": ["a", 3]}, "found a list that mixes numbers and texts"),
        ("", {"stop": ["a"] * 17}, "found a list of texts"),
        ("", {"guided_json": 3}, "guided_json must be a JSON schema, as an object or as text; found 3"),
        ("", {"structured_outputs": {"json": [1]}}, "structured_outputs.json must be a JSON schema, as an object or as text; found a list of numbers"),
        ("", {"logit_bias": [1]}, "logit_bias must be a valid dictionary; found a list of numbers"),
        ("", {"temperature": "x" * 99}, "temperature must be a valid number; found "),
    ],
)  # fmt: skip
def test_a_refusal_is_one_sentence(client: httpx.Client, path: str, fields: dict[str, Any], message: str) -> None:
    body = {**(CHAT if path else TEXT), **fields}
    error = refusal(client, f"/v1/{path}completions", body)
    assert message in error["message"]
    assert error["message"].count("; ") <= 1
    assert not re.search(r"\b(str|list|dict)\[|function-|Input should", error["message"])
    assert error["param"].partition(".")[0] in fields


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
def test_the_scheme_of_the_key_has_any_case(service: ModelService, scheme: str) -> None:
    from mega_eval.server.request_gate import RequestCheckMiddleware, ServerLimits

    gate = RequestCheckMiddleware(lambda *_: None, ServerLimits("secret-key", None, 1, 1, 1), service.metrics)  # type: ignore[arg-type,return-value]
    headers = [(b"authorization", f"{scheme} secret-key".encode())]
    gate._check_access({"type": "http", "path": "/v1/models", "method": "GET", "headers": headers})
