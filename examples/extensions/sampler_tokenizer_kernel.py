"""Parts around a model as an extension: a sampler of generation."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from mega_trainer.extend import Extension, Sampler, StrictConfig


class TopSigmaOptions(StrictConfig):
    """Settings of the sampler: the width of the kept range of scores, in standard deviations."""

    n: float = Field(1.0, gt=0)


def keep_top_sigma(
    scores: Tensor, prompt: Sequence[int], generated: Sequence[int], *, options: TopSigmaOptions
) -> Tensor:
    """Exclude scores [V] more than n standard deviations below the largest (top-n-sigma, arXiv:2411.07641)."""
    finite = scores[scores.isfinite()]
    return scores.masked_fill(scores < finite.max() - options.n * finite.std(correction=0), float("-inf"))


EXTENSION = Extension(
    name="sampler-tokenizer-kernel",
    version="1.0",
    api=1,
    samplers={"top_n_sigma": Sampler(keep_top_sigma, TopSigmaOptions)},
)
