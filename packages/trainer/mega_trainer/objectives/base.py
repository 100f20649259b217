"""What the steps of a run ask of an objective; and the usual one, the mean cross entropy of the tokens that count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mega_data.loader import StepBatch
from mega_trainer.batch import MicroBatch
from mega_trainer.evaluation import counted_tokens
from mega_trainer.mesh import Groups
from mega_trainer.pipeline.run import Executor
from mega_trainer.step import count_tokens, own_counts


class Objective:
    """The mean cross entropy.

    Another objective is a function of the log-probabilities of a micro-batch's tokens: it gives its micro-batches a `weigh`,
    by which their gradient becomes its own (`MicroBatch`), and adds up what it tells.

    Args:
        groups: this rank's.
        further: layers that predict further tokens.
    """

    names: Sequence[str] = ()  # of what it tells beside the loss

    def __init__(self, groups: Groups, further: int) -> None:
        self.groups, self.further = groups, further

    def counts(self, batch: StepBatch) -> list[float]:
        """What a step's mean is over, and so of each layer that predicts further tokens, of all data ranks."""
        return count_tokens(batch, self.further, self.groups)

    def own_counts(self, batch: StepBatch | None) -> list[float]:
        """This rank's part of `counts`."""
        return own_counts(batch, self.further, self.groups)

    def prepared(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """This rank's micro-batches of a step, or of a validation's, with what the objective has to do with them."""
        return micro

    def measured(self, sums: Tensor) -> Tensor:
        """See `train_step`."""
        return sums

    def totals(self, executor: Executor, sums: Tensor, micro: Sequence[MicroBatch]) -> Tensor:
        """See `evaluate`."""
        return counted_tokens(executor, sums, micro)

    def told(self, figures: Sequence[float], count: float | None = None) -> Mapping[str, float]:
        """What metrics.jsonl has of a step's means, of so many; or of a validation's."""
        return dict(zip(self.names, figures, strict=True))
