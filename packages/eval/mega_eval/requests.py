"""Requests to the engine and the events that answer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mega_eval.sampling import Sampling
from mega_eval.text import Finish, Limits
from mega_trainer.model.vision.images import Images


@dataclass(frozen=True)
class Request:
    """Prompt to continue, with its limits and sampling settings.

    Attributes:
        prompt: its tokens.
        limits: what ends it.
        sampling: how tokens are drawn.
        sample: number of the draw; random draws depend on (seed, sample, step) alone.
        logprobs: so many likeliest alternatives are told with each token; 0: its own probability alone; None: nothing.
        prompt_logprobs: tell those of the prompt's tokens, too.
        grammar: a JSON schema or a Lark grammar that the text has to obey.
        adapter: name of the one that the model has for this text; None: none.
        images: what stands at the prompt's placeholders, where it has any: `Images` of one row, whose features are known.
        drawn: so many of the prompt's last tokens have been generated before: draws and penalties go on behind them.
    """

    prompt: Sequence[int]
    limits: Limits = field(default_factory=Limits)
    sampling: Sampling = field(default_factory=Sampling)
    sample: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: str | None = None
    drawn: int = 0
    images: Images | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class Scored:
    """A token's log-probability and the likeliest alternatives, by the model's own distribution, before any setting."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Event:
    """New text and tokens of one request after one engine step.

    Attributes:
        request: its number.
        text: what is certain now: whole characters, no part of a stop string.
        tokens: the new tokens, several where guesses were right.
        scored: the same with their probabilities, where these were asked for; else empty.
        prompt: once, the prompt's tokens where they were asked for; None for the first, which nothing predicts.
        finish: what ended it, in the last event.
        error: why the request failed; the event is its last, and other requests are not affected.
    """

    request: int
    text: str
    tokens: list[int]
    scored: list[Scored]
    prompt: list[Scored | None] | None
    finish: Finish | None
    error: Exception | None = None


def scored(logits: Tensor, token: int, alternatives: int) -> Scored:
    """Return the log-probability of `token` by logits [V], and those of the most likely `alternatives`."""
    logprobs = logits.double().log_softmax(-1)
    values, tokens = logprobs.topk(min(alternatives, len(logprobs)))
    return Scored(token, float(logprobs[token]), list(zip(tokens.tolist(), values.tolist(), strict=True)))
