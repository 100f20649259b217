"""Choosing the next token: greedy, or drawn with temperature, top-k and top-p (arXiv:1904.09751).

A draw is a function of (seed, sample, step) alone. It comes from the CPU, whatever the model runs on, and decides by one
uniform number per row; so a sample's text depends neither on its neighbours in the batch nor on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from mega_common.config import Config
from mega_trainer.rng import generator


class Sampling(Config):
    """How tokens are drawn. `top_k` is applied before `top_p`, both after the temperature."""

    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 takes the likeliest token each time")
    top_k: PositiveInt | None = Field(None, description="draw from so many likeliest tokens only")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the fewest tokens with this probability together")
    seed: int = 0


def choose(logits: Tensor, sampling: Sampling, samples: Sequence[int], step: int) -> Tensor:
    """The next token of each row, int64 [B].

    Args:
        logits: [B, V].
        sampling: how to draw.
        samples: the number of each row's sample [B].
        step: tokens drawn before.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    likely, tokens = ranked(logits, sampling)
    cumulative = likely.cumsum(-1)
    draws = _draws(sampling.seed, samples, step).to(logits.device)
    place = torch.searchsorted(cumulative, draws * cumulative[:, -1:])
    return tokens.gather(1, place).squeeze(1)


def ranked(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Weights to draw by, fp64 [B, V] from the largest on, zero for what is cut off, and their tokens, int64 [B, V]."""
    scores = logits.double()
    scores = (scores - scores.amax(-1, keepdim=True)) / sampling.temperature
    likely, tokens = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        likely[:, sampling.top_k :] = 0
    likelier = likely.cumsum(-1) - likely
    likely[likelier >= sampling.top_p * likely.sum(-1, keepdim=True)] = 0
    return likely, tokens


def _draws(seed: int, samples: Sequence[int], step: int) -> Tensor:
    """One number of (0, 1] for each row, fp64 [B, 1]."""
    draws = [
        torch.rand(1, generator=generator("cpu", seed, "sample", sample, step), dtype=torch.float64)
        for sample in samples
    ]
    return 1 - torch.stack(draws)
