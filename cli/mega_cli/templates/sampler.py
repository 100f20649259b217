"""Sampler `my_extension`: a penalty on repeated pairs of tokens. Change it to yours.

Temperature, top-k, top-p and min-p are applied to its result. It depends on its arguments alone, so that a text is the same
in any batch and with draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pydantic import Field
from torch import Tensor

from mega_trainer.extend import Extension, Sampler, StrictConfig


class PairOptions(StrictConfig):
    """Settings of the sampler (`--sampler-option`, or `sampler_options` of a request): the penalty of repeated pairs."""

    penalty: float = Field(2.0, ge=0, description="subtracted from the scores of tokens that make a pair again")


def penalize_pairs(scores: Tensor, prompt: Sequence[int], generated: Sequence[int], *, options: PairOptions) -> Tensor:
    """Return next-token scores [V], lowered for tokens that would repeat a pair of adjacent tokens of the text.
    A score of -inf would exclude a token.
    """
    text = [*prompt, *generated]
    seen = sorted({second for first, second in pairwise(text) if first == text[-1]})
    scores = scores.clone()
    scores[seen] -= options.penalty
    return scores


EXTENSION = Extension(
    name="my-extension", version="0.1", api=1, samplers={"my_extension": Sampler(penalize_pairs, PairOptions)}
)
