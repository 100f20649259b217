"""Attention score modification `my_extension`: a penalty by distance, smaller for later heads. Change it to yours.

The function is that of torch's FlexAttention (`score_mod`). It may mask a pair by -inf, and needs no tensor parallelism:
`head` counts all heads of the model.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from mega_trainer.extend import Extension, ScoreFunction, StrictConfig


class DistanceOptions(StrictConfig):
    """Settings of `model.functions.my_extension` in run.yaml."""

    slope: float = Field(0.25, ge=0, description="penalty of the first head for each token of distance")


def modify(
    score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor, *, options: DistanceOptions
) -> Tensor:
    """Return the scaled scores, less a penalty by distance; only differences of positions have a meaning."""
    return score - options.slope / (1 + head) * (query - key)


EXTENSION = Extension(
    name="my-extension", version="0.1", api=1, attention_scores={"my_extension": ScoreFunction(modify, DistanceOptions)}
)
