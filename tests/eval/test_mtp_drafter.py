"""Guesses by the model's own layers for further tokens: what one pass over the whole text would guess, and they change no token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engines import Numbers, engine_of, model_of, run, tokens_of
from tiny_models import BASE

from mega_common.model_config import ModelConfig
from mega_eval.engine_requests import AdaptiveDraftLength, EngineRequest, RequestState
from mega_eval.inference_engine import InferenceEngine
from mega_eval.paged_cache import PAGE
from mega_eval.sampling import Sampling
from mega_eval.text_stream import GenerationLimits
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.input_embeddings import apply_embedding_scale

PROMPTS = [[(7 * i * i + 3 * i) % 61 for i in range(19)], [7], [60, 0, 0, 60, 1]]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.2, top_p=0.9, repetition_penalty=1.3),
]
LATENT: dict[str, Any] = {
    **BASE, "mla": {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
    "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16},
}  # fmt: skip
MODELS = {
    "one": {**BASE, "mtp_layers": 1}, "two": {**BASE, "mtp_layers": 2, "tie_embeddings": True}, "latents": {**LATENT, "mtp_layers": 2},
}  # fmt: skip


@torch.no_grad()
def guesses(model: Decoder, tokens: Sequence[int]) -> list[int]:
    """What layer after layer guesses to follow all of the tokens but the last, which is known, without any cache."""
    found: list[int] = []
    positions = torch.arange(len(tokens) - 1)[None]
    context = model.make_forward_context(positions)
    hidden = model.head.norm(model(model.embed_inputs(torch.tensor([tokens[:-1]]), positions), context))
    for k, predictor in enumerate(model.predictors):
        following = torch.tensor([[*tokens, *found][k + 1 :]])
        hidden = predictor(apply_embedding_scale(model.embedding(following), model.config), hidden, context)
        found.append(int(model.head.compute_logits(hidden, model.get_output_projection())[0, -1].argmax()))
    return found


class Eager(AdaptiveDraftLength):
    """Guesses in every step, right or wrong."""

    def next_draft_length(self) -> int:
        return 2


class Watched(InferenceEngine):
    """Keeps what was guessed, and after which tokens."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model, Numbers(), cache_tokens=12 * PAGE, batch_size=3, drafter="mtp", chunk_tokens=7)
        self.seen: list[tuple[list[int], list[int]]] = []

    def add_request(self, request: EngineRequest) -> int:
        number = super().add_request(request)
        self._waiting[-1].draft_length = Eager()
        return number

    def _schedule_step(self) -> list[tuple[RequestState, int]]:
        self.seen += [(list(row.tokens), row.drafts) for row in self._running if row.drafts]
        return super()._schedule_step()


@pytest.mark.parametrize("name", MODELS)
def test_guesses_are_those_of_a_pass_over_the_whole_text(name: str) -> None:
    model = model_of(ModelConfig.parse(MODELS[name]))
    engine = Watched(model)
    run(engine, [EngineRequest(prompt, GenerationLimits(24)) for prompt in PROMPTS])
    assert len(engine.seen) > 40
    for tokens, guessed in engine.seen:
        assert guessed == guesses(model, tokens)[: len(guessed)]
    assert {len(guessed) for _, guessed in engine.seen} >= {len(model.predictors)}


@pytest.mark.parametrize("name", MODELS)
def test_they_change_no_token_greedy_or_drawn(name: str) -> None:
    model = model_of(ModelConfig.parse(MODELS[name]))
    requests = [
        EngineRequest(prompt, GenerationLimits(16, ends={3}), sampling, sample=number)
        for number, (prompt, sampling) in enumerate((p, s) for p in [PROMPTS[0], [1, 2, 3, 1, 2]] for s in SAMPLINGS)
    ]
    engine = engine_of(model, cache_tokens=5 * PAGE, batch_size=3, drafter="mtp")  # so few that texts begin anew
    for number, events in run(engine, requests).items():
        (plain,) = run(engine_of(model), [requests[number]]).values()
        assert (tokens_of(events), events[-1].finish) == (tokens_of(plain), plain[-1].finish)
    assert engine.num_free_pages == engine.num_pages


def test_what_is_drawn_with_them_is_distributed_as_without() -> None:
    """The second token of many draws, against the model's own distribution: chi-square over 61 tokens."""
    model, count = model_of(ModelConfig.parse(MODELS["one"])), 500
    sampling = Sampling(temperature=0.5)
    requests = [EngineRequest([5], GenerationLimits(3), sampling, sample=sample) for sample in range(count)]
    found = torch.zeros(61, dtype=torch.float64)
    for events in run(engine_of(model, batch_size=64, cache_tokens=64 * PAGE, drafter="mtp"), requests).values():
        found[tokens_of(events)[1]] += 1

    @torch.no_grad()
    def following(tokens: list[int]) -> torch.Tensor:
        row, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
        return (
            model.compute_logits(model(model.embed_inputs(row, positions), model.make_forward_context(positions)))[
                0, -1
            ]
            / 0.5
        ).softmax(-1)

    expected = following([5]) @ torch.stack([following([5, token]) for token in range(61)]) * count
    rare = expected < 5
    seen, wanted = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (found, expected))
    statistic, freedom = float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1
    assert 5 < freedom < 60
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations
