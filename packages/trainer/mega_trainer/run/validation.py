"""Loss on validation data during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.comm import all_reduce
from mega_trainer.distributed.device import to_host
from mega_trainer.pipeline.executor import PipelineExecutor


def next_token_totals(executor: PipelineExecutor, sums: Tensor, batches: Sequence[MicroBatch]) -> Tensor:
    """Return the sum of the next-token losses and the number of tokens that count: fp64 [2]."""
    return torch.stack([sums[0], torch.stack([batch.weights.sum(dtype=torch.float64) for batch in batches]).sum()])


@torch.no_grad()
def evaluate_losses(
    executor: PipelineExecutor,
    steps: Iterable[Sequence[MicroBatch]],
    totals: Callable[[PipelineExecutor, Tensor, Sequence[MicroBatch]], Tensor] = next_token_totals,
) -> list[float]:
    """Return the mean loss over the micro-batches of all steps, forward only, and the further means of `totals`; the
    host waits once, at the end.

    Args:
        totals: makes of the sums of a step's losses [2] those to be told and, last, what their mean is over.
    """
    found = [totals(executor, executor.run_operations(batches, 1.0), batches) for batches in steps]
    total, groups = torch.stack(found).sum(0), executor.parallel_groups
    if groups.tp.rank > 0 or executor.last_stage_index not in executor.stages:
        total.zero_()
    all_reduce(total, groups.world)
    *sums, count = to_host(total).tolist()
    return [each / max(count, 1.0) for each in sums]
