"""Callback `my_extension`: the perplexity of each step in metrics.jsonl. Change it to yours.

It is called on all ranks after each step, without gradients. `finished.executor.stages` has this rank's part of the model,
and `finished.optimizer` its main weights and gradients. Collective calls are allowed if all ranks make them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import Field

from mega_trainer.extend import Callback, Extension, FinishedStep, StrictConfig


class PerplexityOptions(StrictConfig):
    """Settings of `callbacks.my_extension` in run.yaml."""

    largest: float = Field(1e6, gt=1, description="upper limit of the number")


class Perplexity:
    """Callback that logs exp(loss) of each step, at most `largest`, as `my_extension/perplexity`."""

    def __init__(self, options: PerplexityOptions) -> None:
        self.options = options

    def __call__(self, finished: FinishedStep) -> Mapping[str, float]:
        """Return the numbers of a step for metrics.jsonl, by name."""
        return {"perplexity": min(self.options.largest, math.exp(finished.result.loss))}


EXTENSION = Extension(
    name="my-extension", version="0.1", api=1, callbacks={"my_extension": Callback(Perplexity, PerplexityOptions)}
)
