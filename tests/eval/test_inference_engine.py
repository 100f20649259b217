from __future__ import annotations

import json
import random
import re
import resource
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import engine_of, model_of, run, step, tokens_of
from tiny_models import BASE, VARIANTS, YARN, variant

from mega_common.errors import DataError
from mega_common.model_config import ModelConfig
from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.drafters import ModelDrafter, NgramDrafter
from mega_eval.engine_requests import AdaptiveDraftLength, Drafter, EngineRequest, GenerationEvent
from mega_eval.inference_engine import InferenceEngine
from mega_eval.paged_cache import PAGE
from mega_eval.sampling import Sampling
from mega_eval.text_stream import GenerationLimits
from mega_trainer.kernels.attention_masks import PagedAttentionName
from mega_trainer.model.decoder import Decoder


@torch.no_grad()
def uncached(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [S, V] after each token, in one forward pass."""
    row, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    return model.compute_logits(model(model.embed_inputs(row, positions), model.make_forward_context(positions)))[
        0
    ].log_softmax(-1)


PROMPTS = [[(7 * i * i + 3 * i) % 61 for i in range(19)], [7], [60, 0, 0, 60, 1]]
LATENT: dict[str, Any] = {
    **BASE, "mla": {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
}  # fmt: skip
LATENTS = [LATENT, {**LATENT, "sliding_window": 5, "rope": {"interleaved": True, **YARN}}]
HYBRID: dict[str, Any] = {
    **BASE, "num_layers": 4, "layers": ["mamba+mlp", "delta", "attention+moe", "conv"], "conv": {"kernel": 4, "bias": True}, "position": "none",
    "mamba": {"num_heads": 4, "head_dim": 3, "state_size": 5, "num_groups": 2, "chunk_size": 4},
    "delta": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 3, "value_head_dim": 5, "chunk_size": 4},
    "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 12},
}  # fmt: skip
STATES = {**HYBRID, "num_layers": 2, "layers": ["mamba", "delta+mlp"], "moe": None}
# The frequencies of "dynamic" change as a row grows; kept keys do not, here as in transformers.
DECODERS = [name for name in VARIANTS if name != "dynamic" and variant(name).causal]
MODELS = [variant(name) for name in DECODERS] + [ModelConfig.parse(one) for one in (*LATENTS, HYBRID, STATES)]


SEPARATE = [variant(name) for name in ("grouped", "oss", "gemma2", "bloom", "llama4")] + [ModelConfig.parse(LATENTS[1])]


@pytest.mark.parametrize(
    ("config", "attention"),
    [*((config, None) for config in MODELS), *((config, "rows") for config in SEPARATE)],
    ids=[*DECODERS, "mla", "mla-window", "hybrid", "states", *(f"rows {number}" for number in range(len(SEPARATE)))],
)
def test_a_row_computes_what_it_would_alone_and_without_a_cache(
    config: ModelConfig, attention: PagedAttentionName | None
):
    """In chunks of a prompt, beside rows that come and go, and begun anew where pages are few."""
    model = model_of(config)
    engine = engine_of(model, cache_tokens=3 * PAGE, chunk_tokens=7, attention=attention)
    requests = [EngineRequest(prompt, GenerationLimits(18), logprobs=2, prompt_logprobs=True) for prompt in PROMPTS]
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
    assert engine.num_free_pages == engine.num_pages == 3


def test_requests_that_cannot_be():
    engine = engine_of(model_of(variant("gpt2")))
    for prompt, limits, message in [
        ([], GenerationLimits(), "no tokens"),
        ([5, 61], GenerationLimits(), "token 61 .*vocabulary of 61"),
        ([5, -1], GenerationLimits(), "token -1 "),
        ([1, 2, 3], GenerationLimits(63), "3 tokens and 63 new ones.*64 positions"),
    ]:
        with pytest.raises(DataError, match=message):
            engine.add_request(EngineRequest(prompt, limits))
    with pytest.raises(DataError, match="more than the capacity of the KV cache, 128 tokens"):
        engine_of(MODEL).add_request(EngineRequest([1], GenerationLimits(129)))


MODEL = model_of(variant("grouped"))


def alone(request: EngineRequest) -> tuple[list[int], str | None]:
    (events,) = run(engine_of(MODEL, batch_size=1), [request]).values()
    return tokens_of(events), events[-1].finish


@pytest.mark.parametrize("rounds", [30, pytest.param(3000, marks=pytest.mark.long)])
def test_no_page_is_lost_and_no_token_changed_by_what_else_runs(rounds: int):
    """Many requests, some of which begin alike, some of which are cancelled, in a cache that is too small for them."""
    draw, engine = random.Random(1), engine_of(MODEL, cache_tokens=9 * PAGE, batch_size=6, chunk_tokens=20)
    heads = [[draw.randrange(61) for _ in range(40)] for _ in range(3)]
    requests: dict[int, EngineRequest] = {}
    found: dict[int, list[GenerationEvent]] = {}
    while len(requests) < rounds or engine.num_waiting or engine.num_running:
        if len(requests) < rounds and draw.random() < 0.5:
            prompt = [
                *draw.choice(heads)[: draw.randrange(1, 40)],
                *(draw.randrange(61) for _ in range(draw.randrange(9))),
            ]
            sampling = Sampling(temperature=draw.choice([0.0, 1.5]), seed=draw.randrange(9))
            request = EngineRequest(
                prompt, GenerationLimits(draw.randrange(1, 20), ends={3}), sampling, sample=len(requests)
            )
            number = engine.add_request(request)
            requests[number], found[number] = request, []
        if requests and draw.random() < 0.05:
            cancelled = draw.choice(list(requests))
            engine.cancel_request(cancelled)
            if not (found[cancelled] and found[cancelled][-1].finish):
                del requests[cancelled]
        step(engine, found)
    assert engine.num_free_pages == engine.num_pages
    assert len(requests) > rounds // 2
    for number, request in requests.items():
        assert (tokens_of(found[number]), found[number][-1].finish) == alone(request)


def test_a_state_is_no_larger_after_many_tokens_and_no_other_row_has_it():
    """Rows come and go in places that others had; guesses are not asked for, for a wrong one would change a state."""
    model = model_of(ModelConfig.parse(STATES))
    requests = [
        EngineRequest(prompt, GenerationLimits(length))
        for prompt, length in zip(PROMPTS * 2, (60, 3, 9, 2, 20, 5), strict=True)
    ]
    engine = engine_of(model, batch_size=2, cache_tokens=16 * PAGE, drafter=Guesses())
    found = run(engine, requests, every=2)
    held = [state.shape for layer in engine._cache._states.values() for state in layer]
    assert held == [(2, 3, 32), (2, 4, 3, 5), (2, 3, 32), (2, 4, 3, 5)]
    for number, request in enumerate(requests):
        (alone_,) = run(engine_of(model, batch_size=1), [request]).values()
        assert tokens_of(found[number]) == tokens_of(alone_)


@pytest.mark.long
def test_a_hundred_thousand_tokens_take_no_more_memory_than_a_thousand():
    """Of one row, most of them its prompt, which is computed in chunks; the last are generated one by one."""
    model = model_of(ModelConfig.parse({**STATES, "max_position": 100_000}), torch.float32)
    engine, total, taken = engine_of(model, batch_size=1, cache_tokens=100_000), 100_000, {}
    engine.add_request(EngineRequest([number % 61 for number in range(total - 1000)], GenerationLimits(1000)))
    steps = 0
    while engine.num_waiting or engine.num_running:
        engine.step()
        steps += 1
        taken[steps] = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    assert steps == -(-(total - 1000) // 512) + 999
    assert taken[steps] - taken[2] < 4e6  # the tokens themselves; a state for each would be 60 MB


def test_penalties_change_what_follows():
    request = EngineRequest(PROMPTS[0], GenerationLimits(30))
    plain, _ = alone(request)
    varied, _ = alone(replace(request, sampling=Sampling(presence_penalty=100.0)))
    assert len(set(varied)) == 30 > len(set(plain))
    assert not set(alone(replace(request, sampling=Sampling(repetition_penalty=1e9)))[0]) & set(PROMPTS[0])


def test_rows_that_begin_alike_share_pages():
    engine, prompt = engine_of(MODEL), [*range(40)]
    first = run(engine, [EngineRequest(prompt, GenerationLimits(1))])
    engine.add_request(EngineRequest([*prompt, 5], GenerationLimits(2)))
    engine.add_request(EngineRequest([*prompt, 6], GenerationLimits(2)))
    before = engine.num_free_pages
    engine.step()
    assert before - engine.num_free_pages == 2 + 1 + 1  # two full pages of both, and a page of each
    assert tokens_of(first[0]) == alone(EngineRequest(prompt, GenerationLimits(1)))[0]


def test_a_request_goes_on_as_if_it_had_not_been_cut():
    request = EngineRequest(
        PROMPTS[0], GenerationLimits(12), Sampling(temperature=1.5, seed=4, frequency_penalty=0.3), sample=3
    )
    whole, _ = alone(request)
    rest, _ = alone(replace(request, prompt=[*PROMPTS[0], *whole[:5]], limits=GenerationLimits(7), drawn=5))
    assert rest == whole[5:]


class Guesses:
    """Guesses that are right, wrong or none, as a generator has it."""

    def __init__(self) -> None:
        self.draw, self.right = random.Random(0), 0

    def propose_drafts(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        found = []
        for one in requests:
            tokens = alone(replace(one, limits=replace(one.limits, max_new_tokens=min(4, one.limits.max_new_tokens))))[
                0
            ]
            found.append([token if self.draw.random() < 0.8 else 9 for token in tokens][: self.draw.randrange(5)])
        return found


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.2, top_p=0.9, repetition_penalty=1.3),
]


@pytest.mark.parametrize("kind", ["some", "ngrams", "model"])
def test_guesses_change_no_token_greedy_or_drawn(kind: str):
    drafters: dict[str, Drafter] = {
        "some": Guesses(),
        "ngrams": NgramDrafter(),
        "model": ModelDrafter(engine_of(MODEL)),
    }
    engine = engine_of(MODEL, cache_tokens=12 * PAGE, batch_size=3, drafter=drafters[kind])
    requests = [
        EngineRequest(prompt, GenerationLimits(16, ends={3}), sampling, sample=number)
        for number, (prompt, sampling) in enumerate(
            (p, s) for p in [PROMPTS[0], [1, 2, 3, 1, 2, 3, 1, 2]] for s in SAMPLINGS
        )
    ]
    for number, events in run(engine, requests).items():
        assert (tokens_of(events), events[-1].finish) == alone(requests[number])
        if kind == "model":  # which is the model itself: each guess is right
            assert len(events) <= 1 + 15 // 5
    assert engine.num_free_pages == engine.num_pages


@pytest.mark.parametrize("name", ["dynamic", "long", "gemma2", "oss", "deepseek2", "gpt2"])
def test_guesses_are_checked_as_tokens_are_computed(name: str):
    model = model_of(variant(name))
    request = EngineRequest(PROMPTS[0], GenerationLimits(20))
    draft = ModelDrafter(engine_of(model))
    (one,), (other,) = (run(engine_of(model, drafter=each), [request]).values() for each in (None, draft))
    assert tokens_of(one) == tokens_of(other)


def test_a_smaller_model_that_reads_less_guesses_as_far_as_it_can():
    learned = variant("gpt2")
    model, smaller = (model_of(learned.model_copy(update={"max_position": most})) for most in (64, 20))
    request = EngineRequest([5, 6, 7], GenerationLimits(30))
    (one,), (other,) = (
        run(engine_of(model, drafter=each), [request]).values() for each in (None, ModelDrafter(engine_of(smaller)))
    )
    assert tokens_of(one) == tokens_of(other)


def test_what_is_drawn_with_guesses_is_distributed_as_without():
    """Chi-square over a vocabulary of 61, of tokens that another model guessed."""
    count, other = 500, model_of(variant("multi-query"))
    sampling = Sampling(temperature=0.5)
    requests = [EngineRequest([5], GenerationLimits(3), sampling, sample=sample) for sample in range(count)]
    drafter = ModelDrafter(engine_of(other, batch_size=64, cache_tokens=64 * PAGE))
    engine = engine_of(MODEL, batch_size=64, cache_tokens=64 * PAGE, drafter=drafter)
    found = torch.zeros(61, dtype=torch.float64)
    for events in run(engine, requests).values():
        found[tokens_of(events)[1]] += 1
    first = (uncached(MODEL, [5])[-1] / 0.5).softmax(-1)
    second = torch.stack([(uncached(MODEL, [5, token])[-1] / 0.5).softmax(-1) for token in range(61)])
    expected = first @ second * count
    rare = expected < 5
    seen, wanted = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (found, expected))
    statistic, freedom = float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1
    assert 10 < freedom < 60  # tokens that are neither one nor all
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


def test_guesses_are_trusted_by_how_they_fared():
    trust, asked = AdaptiveDraftLength(), []
    for _ in range(3):  # all right: as many as may be
        asked.append(trust.next_draft_length())
        trust.record_acceptance(asked[-1], asked[-1])
    assert asked == [2, 8, 8]
    trust.record_acceptance(8, 3)
    assert trust.next_draft_length() == 3
    when = []
    for number in range(200):  # never right: ever rarer, and two at most
        if count := trust.next_draft_length():
            when.append(number)
            assert count in (2, 3)
            trust.record_acceptance(count, 0)
    gaps = [b - a for a, b in pairwise(when)]
    assert gaps[:15] == [*range(1, 16)]
    assert set(gaps[15:]) == {16}


def test_ngrams_repeat_what_followed():
    def guess(tokens: list[int], room: int = 3) -> list[int]:
        return NgramDrafter().propose_drafts([EngineRequest(tokens, GenerationLimits(room))])[0]

    assert guess([1, 2, 3, 4, 5, 9, 2, 3]) == [4, 5, 9]
    assert guess([1, 2, 7, 1, 2, 8, 1, 2]) == [8, 1, 2]  # the latest
    assert guess([1, 2, 3, 4, 5, 9, 2, 3], room=1) == [4]
    assert guess([1, 2, 3]) == guess([4]) == []
    few = [EngineRequest([1, 2, 3, 1, 2], GenerationLimits(1))] * 3
    assert NgramDrafter(texts=3).propose_drafts(few) == [[3]] * 3
    assert NgramDrafter(texts=2).propose_drafts(few) == [[]] * 3  # a batch of many texts pays for each token
    assert guess([256, 1, 5, 6, 0, 256]) == []  # bytes of which stand between two tokens


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Tokenizer]:
    tokenizer = train_tokenizer(["the end of the story"] * 3, 280, tmp_path_factory.mktemp("tokenizer"))
    return model_of(variant("grouped").model_copy(update={"vocab_size": tokenizer.vocab_size + 3})), tokenizer


SCHEMA = (
    '{"type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"], "additionalProperties": false}'
)


@pytest.mark.parametrize("drafter", [None, NgramDrafter()])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_text_obeys_a_grammar(words: tuple[Decoder, Tokenizer], temperature: float, drafter: Drafter | None):
    model, tokenizer = words
    assert tokenizer.eos_id is not None
    limits, sampling = GenerationLimits(90, ends={tokenizer.eos_id}), Sampling(temperature=temperature)
    prompt = tokenizer.encode("the end")
    engine = InferenceEngine(model, tokenizer, cache_tokens=900, batch_size=4, drafter=drafter)
    schema = EngineRequest(prompt, limits, sampling, grammar=SCHEMA)
    lark = EngineRequest(prompt, limits, sampling, grammar='start: "no" | "yes" | "per" "haps"+ "!"')
    unending = replace(lark, limits=GenerationLimits(90))
    found = ["".join(event.text for event in events) for events in run(engine, [schema, lark, unending]).values()]
    try:
        assert json.loads(found[0])["a"] in ("x", "yy")
    except ValueError:  # white space may go on for as long as a model likes
        assert re.fullmatch(r'\{\s*("(a("\s*:?\s*("\w*"?)?)?)?)?\s*', found[0])
    for text in found[1:]:
        assert re.fullmatch("no|yes|per(haps)+!|per(haps)*h?a?p?s?", text)


@pytest.mark.parametrize("grammar", ['{"type": 7}', "{no json", "start: unknown", ""])
def test_grammars_that_cannot_be(words: tuple[Decoder, Tokenizer], grammar: str):
    with pytest.raises(DataError, match="grammar"):
        InferenceEngine(*words, cache_tokens=90, batch_size=1).add_request(
            EngineRequest([1], grammar=grammar, limits=GenerationLimits(5))
        )
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        engine_of(MODEL).add_request(EngineRequest([1], grammar=SCHEMA, limits=GenerationLimits(5)))
