"""Interface of training objectives, and the default objective, the mean cross entropy of the unmasked tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mega_data.batch_loader import StepBatch
from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.data.token_counts import count_local_tokens, count_step_tokens
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.pipeline.executor import PipelineExecutor


class TrainingObjective:
    """Objective of ordinary training, the mean cross entropy over unmasked tokens, and base class of the other
    objectives.

    Another objective is a function of the log-probabilities of a micro-batch's tokens: it sets the micro-batches'
    `weight_fn`, which gives the gradient in the log-probabilities, and sums its metrics.

    Args:
        groups: process groups of this rank.
        mtp_layers: number of multi-token prediction layers.
    """

    metric_names: Sequence[str] = ()  # metrics in addition to the loss

    def __init__(self, groups: ParallelGroups, mtp_layers: int) -> None:
        self.groups, self.mtp_layers = groups, mtp_layers

    def count_step_terms(self, batch: StepBatch) -> list[float]:
        """Return the number of terms (tokens) that the step's loss and each MTP layer's loss are means of, over all
        data ranks.
        """
        return count_step_tokens(batch, self.mtp_layers, self.groups)

    def count_local_terms(self, batch: StepBatch | None) -> list[float]:
        """Return this rank's contribution to `count_step_terms`; the sum over all ranks is the total."""
        return count_local_tokens(batch, self.mtp_layers, self.groups)

    def prepare_micro_batches(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return this rank's micro-batches of a step or validation, with the targets that the objective needs added."""
        return micro

    def append_metric_sums(self, sums: Tensor) -> Tensor:
        """Return the sums of a step's losses and metrics, from the loss sums of the pipeline; see
        `StepHooks.append_metric_sums`.
        """
        return sums

    def validation_totals(self, executor: PipelineExecutor, sums: Tensor, micro: Sequence[MicroBatch]) -> Tensor:
        """Return the sums of a validation's losses and metrics, and the number of terms that they sum over."""
        count = torch.stack([batch.weights.sum(dtype=torch.float64) for batch in micro]).sum()
        return torch.stack([sums[0], count])

    def metrics(self, figures: Sequence[float], count: float | None = None) -> Mapping[str, float]:
        """Return the metrics to write to metrics.jsonl, from `figures`, the means of a step over `count` terms or of a
        validation (`count` None).
        """
        return dict(zip(self.metric_names, figures, strict=True))
