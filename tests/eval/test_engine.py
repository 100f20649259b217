from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_models import BASE, VARIANTS, YARN, variant

from mega_common.errors import DataError
from mega_common.model_config import ModelConfig
from mega_eval.engine import Engine, Event, Request
from mega_eval.pages import PAGE
from mega_eval.sampling import Sampling
from mega_eval.text import Limits
from mega_trainer.model.builder import Builder
from mega_trainer.model.decoder import Decoder


class Numbers:
    """A tokenizer whose texts are numbers: '3 5 8 '."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f"{token} " for token in ids)


def model_of(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(Builder(config, dtype=dtype)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def engine_of(model: Decoder, **options: Any) -> Engine:
    return Engine(model, Numbers(), **{"cache_tokens": 8 * PAGE, "batch_size": 8, **options})


def run(engine: Engine, requests: Sequence[Request] = (), *, every: int = 0) -> dict[int, list[Event]]:
    """The events of each request until all have finished; the next one is added after `every` so many steps."""
    found: dict[int, list[Event]] = {}
    for request in requests:
        found[engine.add(request)] = []
        for _ in range(every):
            _step(engine, found)
    while engine.waiting or engine.running:
        _step(engine, found)
    return found


def _step(engine: Engine, found: dict[int, list[Event]]) -> None:
    for event in engine.step():
        found[event.request].append(event)


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


@torch.no_grad()
def uncached(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [S, V] after each token, in one forward pass."""
    row, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    return model.logits(model(model.embed(row, positions), model.context(positions)))[0].log_softmax(-1)


PROMPTS = [[(7 * i * i + 3 * i) % 61 for i in range(19)], [7], [60, 0, 0, 60, 1]]
LATENT: dict[str, Any] = {
    **BASE, "mla": {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
}  # fmt: skip
LATENTS = [LATENT, {**LATENT, "sliding_window": 5, "rope": {"interleaved": True, **YARN}}]
# The frequencies of "dynamic" change as a row grows; kept keys do not, here as in transformers.
MODELS = [variant(name) for name in VARIANTS if name != "dynamic"] + [ModelConfig.parse(one) for one in LATENTS]


@pytest.mark.parametrize("config", MODELS, ids=[*(name for name in VARIANTS if name != "dynamic"), "mla", "mla-window"])
def test_a_row_computes_what_it_would_alone_and_without_a_cache(config: ModelConfig):
    """In chunks of a prompt, beside rows that come and go, and begun anew where pages are few."""
    model = model_of(config)
    engine = engine_of(model, cache_tokens=3 * PAGE, chunk_tokens=7)
    requests = [Request(prompt, Limits(18), logprobs=2, prompt_logprobs=True) for prompt in PROMPTS]
    for number, events in run(engine, requests, every=1).items():
        row = list(PROMPTS[number])
        told = [one for event in events for one in event.prompt or []]
        for one, expected in zip(told[1:], uncached(model, row), strict=False):
            assert one is not None
            assert one.logprob == pytest.approx(float(expected[one.token]), abs=1e-10)
        for one in [one for event in events for one in event.scored]:
            expected = uncached(model, row)[-1]
            assert one.logprob == pytest.approx(float(expected.max()), abs=1e-10)
            assert [token for token, _ in one.top] == expected.topk(2).indices.tolist()
            row.append(one.token)
    assert engine.free_pages == engine.pages == 3


def test_requests_that_cannot_be():
    engine = engine_of(model_of(variant("gpt2")))
    for prompt, limits, message in [
        ([], Limits(), "no tokens"),
        ([5, 61], Limits(), "token 61 .*vocabulary of 61"),
        ([5, -1], Limits(), "token -1 "),
        ([1, 2, 3], Limits(63), "3 tokens and 63 new ones.*64 positions"),
    ]:
        with pytest.raises(DataError, match=message):
            engine.add(Request(prompt, limits))
    with pytest.raises(DataError, match="more than the 128 that the cache has room for"):
        engine_of(MODEL).add(Request([1], Limits(129)))


MODEL = model_of(variant("grouped"))


def alone(request: Request) -> tuple[list[int], str | None]:
    (events,) = run(engine_of(MODEL, batch_size=1), [request]).values()
    return tokens_of(events), events[-1].finish


@pytest.mark.parametrize("rounds", [40, pytest.param(3000, marks=pytest.mark.long)])
def test_no_page_is_lost_and_no_token_changed_by_what_else_runs(rounds: int):
    """Many requests, some of which begin alike, some of which are cancelled, in a cache that is too small for them."""
    draw, engine = random.Random(1), engine_of(MODEL, cache_tokens=9 * PAGE, batch_size=6, chunk_tokens=20)
    heads = [[draw.randrange(61) for _ in range(40)] for _ in range(3)]
    requests: dict[int, Request] = {}
    found: dict[int, list[Event]] = {}
    while len(requests) < rounds or engine.waiting or engine.running:
        if len(requests) < rounds and draw.random() < 0.5:
            prompt = [
                *draw.choice(heads)[: draw.randrange(1, 40)],
                *(draw.randrange(61) for _ in range(draw.randrange(9))),
            ]
            sampling = Sampling(temperature=draw.choice([0.0, 1.5]), seed=draw.randrange(9))
            request = Request(prompt, Limits(draw.randrange(1, 40), ends={3}), sampling, sample=len(requests))
            number = engine.add(request)
            requests[number], found[number] = request, []
        if requests and draw.random() < 0.05:
            cancelled = draw.choice(list(requests))
            engine.cancel(cancelled)
            if not (found[cancelled] and found[cancelled][-1].finish):
                del requests[cancelled]
        _step(engine, found)
    assert engine.free_pages == engine.pages
    assert len(requests) > rounds // 2
    for number, request in requests.items():
        assert (tokens_of(found[number]), found[number][-1].finish) == alone(request)
