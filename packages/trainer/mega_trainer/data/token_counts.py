"""Number of loss terms of a step, from the loss masks in host memory."""

from __future__ import annotations

import numpy as np
import torch

from mega_data.batch_loader import StepBatch
from mega_trainer.data.micro_batch import mtp_label_weights
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.distributed.process_groups import ParallelGroups


def count_step_tokens(batch: StepBatch, mtp_layers: int, groups: ParallelGroups) -> list[float]:
    """Return the counts of a step over all data ranks: unmasked tokens, then unmasked tokens for each of `mtp_layers`
    MTP layers, then, for samples of two segments, the samples.

    Summed in host memory, for a first step; later steps get their counts with the scalars of the step before.
    """
    counts = torch.tensor(count_local_tokens(batch, mtp_layers, groups), dtype=torch.float64)
    all_reduce(counts, groups.world)
    return counts.tolist()


def count_local_tokens(batch: StepBatch | None, mtp_layers: int, groups: ParallelGroups) -> list[float]:
    """Return this rank's share of `count_step_tokens`; of the ranks that read the same samples only the first returns
    nonzero counts.
    """
    pairs = [] if batch is None or batch.pair_labels is None else [float(len(batch.pair_labels))]
    if batch is None or any(group.rank for group in (groups.tp, groups.cp, groups.pp)):
        return [0.0] * (1 + mtp_layers + len(pairs))
    weights = [batch.loss_weights, *(mtp_label_weights(batch, k + 1) for k in range(mtp_layers))]
    return [*(float(each.sum(dtype=np.float64)) for each in weights), *pairs]
