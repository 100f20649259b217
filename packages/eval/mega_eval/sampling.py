"""Sampling of the next token: greedy, or with temperature, top-k, top-p (arXiv:1904.09751) and min-p
(arXiv:2407.01082).

A draw is a function of (seed, sample, step) alone. It comes from the CPU, whatever the model runs on, and decides by one
uniform number; so a sample's text depends neither on its neighbours in the batch nor on the device.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from mega_common.errors import DataError
from mega_common.strict_config import StrictConfig
from mega_trainer.distributed.rng import seeded_generator

SMALLEST = 1e-300  # temperature and share of probabilities; smaller ones are computed as this


class Sampling(StrictConfig):
    """Sampling settings: penalties, then temperature, `top_k`, `top_p` and `min_p` are applied in this order."""

    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 takes the most likely token each time")
    top_k: PositiveInt | None = Field(None, description="draw from so many likeliest tokens only")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the fewest tokens with this probability together")
    min_p: float = Field(0.0, ge=0, le=1, description="draw from tokens with this share of the likeliest's probability")
    repetition_penalty: float = Field(
        1.0,
        ge=1e-9,
        le=1e9,
        allow_inf_nan=False,
        description="divides scores above 0 of tokens seen before, multiplies those below",
    )
    presence_penalty: float = Field(
        0.0,
        ge=-1e9,
        le=1e9,
        allow_inf_nan=False,
        description="taken from the score of a token that was generated before",
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-1e9,
        le=1e9,
        allow_inf_nan=False,
        description="taken from the score of a token for each time that it was generated before",
    )
    no_repeat_ngram_size: NonNegativeInt = Field(
        0, description="no sequence of so many tokens appears twice, the prompt's counted"
    )
    logit_bias: dict[NonNegativeInt, float] = Field({}, description="added to the scores of tokens, by token id")
    allowed_token_ids: list[NonNegativeInt] | None = Field(None, description="the only tokens that may be chosen")
    bad_words_ids: list[Annotated[list[NonNegativeInt], Field(min_length=1)]] = Field(
        [], description="sequences of tokens that never appear, not even when the prompt has the first of them"
    )
    suppress_tokens: list[int] = Field([], description="tokens that are never chosen")
    begin_suppress_tokens: list[int] = Field([], description="tokens that are not chosen first")
    forced_bos_token_id: NonNegativeInt | None = Field(
        None, description="second token of a sequence, after a prompt of one token or an encoder-decoder's start token"
    )
    min_length: NonNegativeInt = Field(0, description="fewest tokens, the prompt's counted, before `min_length_ends`")
    min_new_tokens: NonNegativeInt = Field(0, description="fewest new tokens before `min_length_ends`")
    min_length_ends: list[int] = Field([], description="tokens that end a text, for the two settings before")
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is chosen from unmodified scores."""
        return self.temperature == 0 and not self.modifies_scores

    @property
    def modifies_scores(self) -> bool:
        """True if scores are modified, or depend on the tokens before."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return self.restricts_tokens or bool(penalties or self.logit_bias)

    @property
    def restricts_tokens(self) -> bool:
        """True if some tokens are excluded at some positions."""
        shorter = self.min_length_ends and (self.min_length or self.min_new_tokens)
        lists = self.bad_words_ids or self.suppress_tokens or self.begin_suppress_tokens
        single = self.forced_bos_token_id is not None or self.allowed_token_ids is not None
        return bool(self.no_repeat_ngram_size or lists or shorter or single)


def apply_penalties(logits: Tensor, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """Return the scores [V] after penalties, biases and restrictions, in fp64: no penalty within its bounds makes them
    infinite.

    That on repetition counts the prompt, too, as in transformers (arXiv:1909.05858); the others do not, as in OpenAI's API.
    """
    if not sampling.modifies_scores:
        return logits
    scores, device = logits.to(torch.float64, copy=True), logits.device
    seen = torch.tensor(sorted({*prompt, *generated}), device=device)
    before = scores[seen]
    scores[seen] = torch.where(before < 0, before * sampling.repetition_penalty, before / sampling.repetition_penalty)
    if generated:
        tokens, counts = (
            torch.tensor(column, device=device) for column in zip(*Counter(generated).items(), strict=True)
        )
        scores[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(scores.dtype)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    return apply_restrictions(scores, sampling, prompt, generated) if sampling.restricts_tokens else scores


def apply_restrictions(scores: Tensor, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """Lower the scores [V] of tokens that may not be chosen to the least number, as transformers lowers them to -inf.

    A finite number leaves a token to choose where a grammar permits none of the others, or `allowed_token_ids`, outside of
    which scores are -inf.
    """
    if sampling.allowed_token_ids is not None:
        allowed = torch.tensor(sorted(set(sampling.allowed_token_ids)), device=scores.device)
        scores = torch.full_like(scores, float("-inf")).index_copy(0, allowed, scores[allowed])
    forced, lowest = sampling.forced_bos_token_id, torch.finfo(scores.dtype).min
    begins = forced is not None and forced < len(scores) and len(prompt) + len(generated) == 1
    if begins and bool(scores[forced].isfinite()):
        others = torch.arange(len(scores), device=scores.device) != forced
        scores = scores.where(~others | scores.isinf(), lowest)
    banned = {token for token in _iterate_banned(sampling, prompt, generated) if 0 <= token < len(scores)}
    if not banned:
        return scores
    return scores.index_fill(0, torch.tensor(sorted(banned), device=scores.device), lowest)


def _iterate_banned(sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> Iterator[int]:
    """Yield the tokens that may not follow."""
    tokens = [*prompt, *generated]
    if size := sampling.no_repeat_ngram_size:
        last = tokens[len(tokens) - size + 1 :]
        for start in range(len(tokens) - size + 1):
            if tokens[start : start + size - 1] == last:
                yield tokens[start + size - 1]
    for *before, token in sampling.bad_words_ids:
        if len(before) < len(tokens) and tokens[len(tokens) - len(before) :] == before:
            yield token
    if len(tokens) < sampling.min_length or len(generated) < sampling.min_new_tokens:
        yield from sampling.min_length_ends
    yield from sampling.suppress_tokens
    if len(generated) == int(len(prompt) <= 1 and sampling.forced_bos_token_id is not None):
        yield from sampling.begin_suppress_tokens


def select_most_likely(logits: Tensor) -> list[int]:
    """Return the most likely token of each row of logits [M, V]; -1 where a logit is not a number."""
    values, tokens = logits.max(-1)
    found: list[int] = tokens.where(~values.isnan(), -1).tolist()
    return found


def compute_probabilities(scores: Tensor, sampling: Sampling) -> Tensor:
    """Return the sampling probabilities of the next token, fp64 [V].

    Raises:
        DataError: when the largest of the scores [V] is infinite or not a number: no token may follow.
    """
    if not bool(scores.amax().isfinite()):
        raise DataError("no token can be chosen: the scores of all tokens are excluded, infinite or not a number")
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(-1), len(scores)).double()
    wide = scores.double()
    # a GPU multiplies by the reciprocal, which of smaller temperatures is infinite
    p = ((wide - wide.amax()) / max(sampling.temperature, SMALLEST)).softmax(-1)
    if sampling.top_k is not None and sampling.top_k < len(p):
        p = p.where(p >= p.topk(sampling.top_k).values[-1], 0.0)
    if sampling.top_p < 1:
        p = _keep_top_p(p, (sampling.top_p * p.sum()).clamp(min=SMALLEST))
    if sampling.min_p:
        p = p.where(p >= sampling.min_p * p.amax(), 0.0)
    return p / p.sum()


def _keep_top_p(p: Tensor, share: Tensor) -> Tensor:
    """Keep the fewest most likely tokens whose sum reaches `share`, and set the others to zero; only as many as needed
    are sorted.
    """
    for count in (min(256, len(p)), len(p)):
        values, tokens = p.topk(count)
        likelier = values.cumsum(-1) - values
        if count == len(p) or likelier[-1] >= share:
            break
    return torch.zeros_like(p).scatter_(0, tokens, values.where(likelier < share, 0.0))


def draw_token(p: Tensor, sampling: Sampling, sample: int, step: int) -> int:
    """Draw a token with weights p, fp64 [V].

    Args:
        p: not all zero.
        sampling: whose seed it is.
        sample: number of the sample.
        step: tokens drawn before.
    """
    cumulative = p.cumsum(-1)
    return int(torch.searchsorted(cumulative, draw_uniform(sampling.seed, sample, step) * cumulative[-1:]))


def draw_uniform(seed: int, sample: int, step: int, use: str = "sample") -> float:
    """Return a uniform random number of (0, 1], independent for each `use`."""
    return 1 - float(torch.rand(1, generator=seeded_generator("cpu", seed, use, sample, step), dtype=torch.float64))
