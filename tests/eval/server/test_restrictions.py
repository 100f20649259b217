"""Restrictions of a served folder's generation_config.json hold, with speculative decoding too; a request replaces them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from served_models import engine_for, text_model
from serving import service_of, serving

from mega_eval.drafters import ModelDrafter, NgramDrafter
from mega_eval.engine_requests import Drafter, EngineRequest
from mega_eval.sampling import Sampling, parse_sampling_settings
from mega_eval.server.model_service import ModelService
from mega_eval.text_stream import GenerationLimits

PROMPT, NEW = [70, 71, 70, 71, 72], 16
A, B = 80, 81  # tokens that the requests prefer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory, max_position=128)


def continued(folder: Path, settings: dict[str, Any], drafter: Drafter | None, prompt: list[int]) -> list[int]:
    """Tokens of one request of an engine."""
    engine = engine_for(folder, cache_tokens=256, batch_size=2, drafter=drafter)
    sampling = Sampling.parse(parse_sampling_settings(settings))
    engine.add_request(EngineRequest(prompt, GenerationLimits(NEW, ends=(1,)), sampling))
    tokens: list[int] = []
    while engine.num_waiting or engine.num_running:
        tokens += [token for event in engine.step() for token in event.tokens]
    return tokens


RESTRICTED: list[dict[str, Any]] = [
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"suppress_tokens": list(range(0, 290, 2))},
    {"begin_suppress_tokens": list(range(0, 290, 2))},
    {"bad_words_ids": [[token] for token in range(0, 290, 3)]},
    {"bad_words_ids": [[70, token] for token in range(200)]},
    {"min_new_tokens": 9, "eos_token_id": 1},
    {"min_length": 12, "eos_token_id": [1, 2]},
    {"forced_bos_token_id": 33, "begin_suppress_tokens": [3]},
    {"repetition_penalty": 1.4},
    {"do_sample": True, "temperature": 0.4, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize("settings", RESTRICTED, ids=str)
@pytest.mark.parametrize("prompt", [PROMPT, [7]], ids=["prompt", "one token"])
def test_speculative_decoding_holds_them(folder: Path, settings: dict[str, Any], prompt: list[int]) -> None:
    plain = continued(folder, settings, None, prompt)
    draft = engine_for(folder, cache_tokens=256, batch_size=2)
    for drafter in (NgramDrafter(), ModelDrafter(draft)):
        assert continued(folder, settings, drafter, prompt) == plain


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[ModelService, httpx.Client]]:
    engine = engine_for(folder, cache_tokens=256, batch_size=2, drafter=NgramDrafter())
    service = service_of(engine, folder, max_length=128)
    with serving(service) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield service, client


def ask(served: tuple[ModelService, httpx.Client], own: dict[str, Any], **body: Any) -> list[int]:
    """Tokens of an answer of a server whose folder has these settings in its generation_config.json."""
    service, client = served
    service.default_sampling = parse_sampling_settings(own)
    given = {"prompt": PROMPT, "temperature": 0, "max_tokens": NEW, "logit_bias": {str(A): 60, str(B): 50}, **body}
    answer = client.post("/v1/completions", json={**given, "logprobs": 0})
    assert answer.status_code == 200, answer.text
    return _ids(service, answer.json()["choices"][0]["logprobs"]["tokens"])


def _ids(service: ModelService, names: Sequence[str]) -> list[int]:
    by_name = {service.vocabulary[token].text: token for token in range(service.vocab_size)}
    return [by_name.get(name, -1) for name in names]  # -1: a part of a character


Check = Callable[[list[int]], bool]
SERVED: list[tuple[dict[str, Any], dict[str, Any], Check]] = [
    ({}, {}, lambda found: found == [A] * NEW),
    # the folder's restriction holds
    ({"no_repeat_ngram_size": 1}, {}, lambda found: found[:2] == [A, B] and not {A, B} & set(found[2:])),
    ({"no_repeat_ngram_size": 2}, {}, lambda found: found[:3] == [A, A, B]),
    ({"suppress_tokens": [A]}, {}, lambda found: found == [B] * NEW),
    ({"begin_suppress_tokens": [A]}, {}, lambda found: found == [B, *[A] * (NEW - 1)]),
    ({"bad_words_ids": [[A]]}, {}, lambda found: found == [B] * NEW),
    ({"bad_words_ids": [[A, A]]}, {}, lambda found: found == [A, B] * (NEW // 2)),
    ({"bad_words_ids": [[72, A]]}, {}, lambda found: found == [B, *[A] * (NEW - 1)]),
    ({"min_new_tokens": 5}, {"stop_token_ids": [A]}, lambda found: found == [*[B] * 5, A]),
    ({"min_length": 8}, {"stop_token_ids": [A]}, lambda found: found == [*[B] * 3, A]),
    ({"forced_bos_token_id": 90}, {"prompt": [70]}, lambda found: found == [90, *[A] * (NEW - 1)]),
    # the request's field replaces it
    ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 0}, lambda found: found == [A] * NEW),
    ({}, {"no_repeat_ngram_size": 2}, lambda found: found[:3] == [A, A, B]),
    ({"bad_words_ids": [[A]]}, {"bad_words": []}, lambda found: found == [A] * NEW),
    ({"bad_words_ids": [[A]]}, {"bad_words": ["z"]}, lambda found: found == [A] * NEW),
    ({"min_new_tokens": 5}, {"stop_token_ids": [A], "min_tokens": 0}, lambda found: found == [A]),
    ({"min_length": 12}, {"stop_token_ids": [A], "min_tokens": 2}, lambda found: found == [B, B, A]),
    ({"suppress_tokens": [A, B]}, {"allowed_token_ids": [A]}, lambda found: found == [A] * NEW),
    ({"forced_bos_token_id": 90}, {"prompt": [70], "allowed_token_ids": [A]}, lambda found: found == [A] * NEW),
    # a request's field beside the folder's others
    ({"suppress_tokens": [A]}, {"stop_token_ids": [B], "min_tokens": 3}, lambda found: len(found) > 3 and A not in found),
]  # fmt: skip


@pytest.mark.parametrize(("own", "body", "check"), SERVED, ids=[f"{own} {body}" for own, body, _ in SERVED])
def test_the_server_holds_them_unless_the_request_says_otherwise(
    served: tuple[ModelService, httpx.Client], own: dict[str, Any], body: dict[str, Any], check: Check
) -> None:
    found = ask(served, own, **body)
    assert check(found), found


def test_a_folder_is_served_with_its_own_settings(folder: Path, tmp_path: Path) -> None:
    from mega_cli.serve import load_default_sampling

    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"suppress_tokens": [A], "eos_token_id": 1}))
    assert load_default_sampling(str(tmp_path)) == {"suppress_tokens": [A]}
