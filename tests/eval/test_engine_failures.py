"""Failures of one request among others, and of a whole step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import engine_of, model_of, run, step, tokens_of
from tiny_models import variant

from mega_common.errors import CheckpointError, MegaError
from mega_eval.drafters import ModelDrafter
from mega_eval.engine_requests import EngineRequest, GenerationEvent
from mega_eval.inference_engine import InferenceEngine
from mega_eval.paged_cache import PAGE
from mega_eval.sampling import Sampling
from mega_eval.text_stream import GenerationLimits

PROMPTS = [[(7 * i * i + 3 * i) % 61 for i in range(19)], [7], [60, 0, 0, 60, 1]]
MODEL = model_of(variant("grouped"))


def alone(request: EngineRequest) -> list[int]:
    """Return the tokens of a request in an engine of its own."""
    (events,) = run(engine_of(MODEL, batch_size=1), [request]).values()
    return tokens_of(events)


class BrokenGrammar:
    """Grammar that fails at one of its calls."""

    def __init__(self, call: str, error: Exception) -> None:
        self._call, self._error = call, error

    def mask_scores(self, scores: torch.Tensor) -> torch.Tensor:
        return self._reach("mask", scores)

    def accept_token(self, token: int) -> bool:
        return self._reach("accept", False)

    def _reach(self, call: str, value: Any) -> Any:
        if call == self._call:
            raise self._error
        return value


def break_row(engine: InferenceEngine, number: int, how: str) -> None:
    """Make one request of an engine fail in the way that is named."""
    (row,) = [row for row in (*engine._waiting, *engine._running) if row.number == number]
    if how in ("mask", "accept"):
        row.grammar = BrokenGrammar(how, ValueError("too complex"))  # type: ignore[assignment]
    elif how == "excluded":
        row.grammar = BrokenGrammar("", ValueError())  # type: ignore[assignment]
        row.grammar.mask_scores = lambda scores: torch.full_like(scores, float("-inf"))  # type: ignore[method-assign,union-attr]
    elif how == "text":
        row.text.append_token = lambda token: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    elif how == "stop":
        row.text._release_text = lambda: [][0]  # type: ignore[method-assign,assignment]
    elif how == "drafts":
        row.draft_length.record_acceptance = lambda guessed, right: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    elif how == "logprobs":
        row.request = replace(row.request, logprobs=-1)
    elif how == "sampling":
        row.request = replace(row.request, sampling=Sampling().model_copy(update={"temperature": "x"}))
    elif how == "penalty":  # past the bounds of `Sampling`
        row.request = replace(row.request, sampling=Sampling.model_construct(temperature=1.0, repetition_penalty=0.0))


BREAKS = ["mask", "accept", "excluded", "text", "stop", "drafts", "logprobs", "sampling", "penalty"]


@pytest.mark.parametrize("how", [*BREAKS, "logits"])
def test_a_request_that_fails_ends_no_other(how: str, monkeypatch: pytest.MonkeyPatch):
    engine = engine_of(MODEL, cache_tokens=9 * PAGE)
    numbers = [engine.add_request(EngineRequest(prompt, GenerationLimits(12))) for prompt in PROMPTS]
    found: dict[int, list[GenerationEvent]] = {number: [] for number in numbers}
    for _ in range(3):
        step(engine, found)
    break_row(engine, numbers[1], how)
    if how == "logits":
        logits = type(MODEL).compute_logits
        monkeypatch.setattr(
            MODEL, "compute_logits", lambda x: logits(MODEL, x).index_fill_(0, torch.tensor(1), float("nan"))
        )
    failed = [event for event in engine.step(isolate=True) if (found[event.request].append(event) or event.error)]
    monkeypatch.undo()
    while engine.num_waiting or engine.num_running:
        step(engine, found)
    assert [(event.request, event.finish) for event in failed] == [(numbers[1], None)]
    assert isinstance(failed[0].error, CheckpointError if how == "logits" else Exception)
    for number in (0, 2):
        assert tokens_of(found[numbers[number]]) == alone(EngineRequest(PROMPTS[number], GenerationLimits(12)))
    assert engine.num_free_pages == engine.num_pages


def test_a_request_that_fails_raises_unless_isolated():
    engine = engine_of(MODEL)
    break_row(engine, engine.add_request(EngineRequest([1, 2], GenerationLimits(3))), "excluded")
    with pytest.raises(MegaError, match="no token can be chosen"):
        engine.step()
    assert (engine.num_running, engine.num_free_pages) == (0, engine.num_pages)


def test_a_reset_engine_answers_as_a_new_one():
    engine = engine_of(MODEL, cache_tokens=3 * PAGE, batch_size=2)
    for prompt in PROMPTS:
        engine.add_request(EngineRequest(prompt, GenerationLimits(12)))
    engine.step()
    engine.drop_all_requests()
    assert (engine.num_waiting, engine.num_running, engine.num_free_pages) == (0, 0, 3)
    (events,) = run(engine, [EngineRequest(PROMPTS[0], GenerationLimits(12))]).values()
    assert tokens_of(events) == alone(EngineRequest(PROMPTS[0], GenerationLimits(12)))


def test_a_draft_model_that_fails_for_one_row_still_guesses_for_the_others():
    small = engine_of(MODEL)
    broken = Sampling.model_construct(temperature=1.0, repetition_penalty=0.0)
    asked = [EngineRequest([1, 2, 3], GenerationLimits(2), broken), EngineRequest(PROMPTS[0], GenerationLimits(2))]
    failed, guessed = ModelDrafter(small).propose_drafts(asked)
    assert (failed, guessed) == ([], alone(asked[1]))
    assert (small.num_running, small.num_free_pages) == (0, small.num_pages)
