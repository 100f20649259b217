"""The loss on validation data while a model is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mega_trainer.batch import MicroBatch
from mega_trainer.comm import all_reduce
from mega_trainer.device import to_host
from mega_trainer.pipeline.run import Executor


def counted_tokens(executor: Executor, sums: Tensor, batches: Sequence[MicroBatch]) -> Tensor:
    """The sum of the losses of next tokens, and how many count: fp64 [2]."""
    return torch.stack([sums[0], torch.stack([batch.weights.sum(dtype=torch.float64) for batch in batches]).sum()])


@torch.no_grad()
def evaluate(
    executor: Executor,
    steps: Iterable[Sequence[MicroBatch]],
    totals: Callable[[Executor, Tensor, Sequence[MicroBatch]], Tensor] = counted_tokens,
) -> list[float]:
    """Mean loss of all steps' micro-batches, forward only, and what else `totals` tells. The host waits once, at the end.

    Args:
        totals: makes of the sums of a step's losses [2] those to be told and, last, what their mean is over.
    """
    found = [totals(executor, executor.run(batches, 1.0), batches) for batches in steps]
    total, groups = torch.stack(found).sum(0), executor.groups
    if groups.tp.rank > 0 or executor.last_stage not in executor.stages:
        total.zero_()
    all_reduce(total, groups.world)
    *sums, count = to_host(total).tolist()
    return [each / max(count, 1.0) for each in sums]
