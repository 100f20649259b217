"""Interface of training objectives, and the default objective, the mean cross entropy of the unmasked tokens; number of loss
terms of a step, from the loss masks in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mega_data.batch_loader import StepBatch
from mega_trainer.data.micro_batch import MicroBatch, mtp_label_weights
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.pipeline.executor import PipelineExecutor


class TrainingObjective:
    """Objective of ordinary training, the mean cross entropy of unmasked tokens, and base of all objectives.

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
        """Return the number of terms (tokens) of the step's loss over all data ranks, then of each MTP layer's loss."""
        return count_step_tokens(batch, self.mtp_layers, self.groups)

    def count_local_terms(self, batch: StepBatch | None) -> list[float]:
        """Return this rank's share of the step's number of terms (tokens) for its loss and each MTP layer's loss.
        The sum over all ranks is the total.
        """
        return count_local_tokens(batch, self.mtp_layers, self.groups)

    def prepare_micro_batches(self, batch: StepBatch, micro: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return this rank's micro-batches of a step or validation, with the targets that the objective needs added."""
        return micro

    def append_metric_sums(self, sums: Tensor) -> Tensor:
        """Return this rank's loss sums of a step (`sums`), followed by the sums of the objective's metrics.
        Ordinary training has no such metrics.
        """
        return sums

    def validation_totals(self, executor: PipelineExecutor, sums: Tensor, micro: Sequence[MicroBatch]) -> Tensor:
        """Return the sums of a validation's losses and metrics, and the number of terms that they sum over."""
        count = torch.stack([batch.weights.sum(dtype=torch.float64) for batch in micro]).sum()
        return torch.stack([sums[0], count])

    def metrics(self, figures: Sequence[float], count: float | None = None) -> Mapping[str, float]:
        """Return {name: mean} of the objective's own metrics for a line of metrics.jsonl, from the means `figures`.
        The means are of a step over `count` terms or of a validation (`count` None).
        """
        return dict(zip(self.metric_names, figures, strict=True))


def count_step_tokens(batch: StepBatch, mtp_layers: int, groups: ParallelGroups) -> list[float]:
    """Return a step's counts over all ranks: unmasked tokens, those of MTP layers, and two-segment samples.

    Summed in host memory, for a first step; later steps get their counts with the scalars of the step before.
    """
    counts = torch.tensor(count_local_tokens(batch, mtp_layers, groups), dtype=torch.float64)
    all_reduce(counts, groups.world)
    return counts.tolist()


def count_local_tokens(batch: StepBatch | None, mtp_layers: int, groups: ParallelGroups) -> list[float]:
    """Return a step's token and sample counts of this data rank on its first rank, and zeros on its other ranks.
    The counts are unmasked tokens, those of each MTP layer, and samples of two segments.
    """
    pairs = [] if batch is None or batch.pair_labels is None else [float(len(batch.pair_labels))]
    if batch is None or any(group.rank for group in (groups.tp, groups.cp, groups.pp)):
        return [0.0] * (1 + mtp_layers + len(pairs))
    weights = [batch.loss_weights, *(mtp_label_weights(batch, k + 1) for k in range(mtp_layers))]
    return [*(float(each.sum(dtype=np.float64)) for each in weights), *pairs]
