"""The norm of the gradient over the whole model, and the clip by it (arXiv:1211.5063)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_trainer.comm import Group, all_reduce
from mega_trainer.parallel.shared import Buffer


def grad_norm(buffers: Sequence[Buffer], model_groups: Sequence[Group]) -> Tensor:
    """L2 norm over the whole model, each canonical element counted once; fp64 scalar, the same on all ranks.

    Partial sums are made per slice in every ZeRO level and added in one order, so that the levels agree in bits.

    Args:
        buffers: this rank's, with their reduced gradients.
        model_groups: the groups over which different ranks hold different parameters, besides the buffers' `parts`.
    """
    zero = torch.zeros((), dtype=torch.float64, device=buffers[0].shards[0].grads.device)
    totals = {buffer.kind.parts: zero.clone() for buffer in buffers}
    for buffer in buffers:
        if buffer.kind.counts_here:
            totals[buffer.kind.parts] += _squares(buffer)
    for parts, total in totals.items():
        if parts is not None:
            all_reduce(total, parts)
    total = sum(totals.values(), zero)
    for group in model_groups:
        all_reduce(total, group)
    return total.sqrt()


def _squares(buffer: Buffer) -> Tensor:
    ranks = buffer.kind.data.size
    slices = torch.zeros(len(buffer.shards), ranks, dtype=torch.float64, device=buffer.shards[0].grads.device)
    for row, shard in zip(slices, buffer.shards, strict=True):
        if buffer.sharded:
            row[buffer.kind.data.rank] = torch.linalg.vector_norm(shard.grads, dtype=torch.float64).square()
        else:
            for index, part in enumerate(shard.grads.chunk(ranks)):
                row[index] = torch.linalg.vector_norm(part, dtype=torch.float64).square()
    if buffer.sharded:
        all_reduce(slices, buffer.kind.data)  # one non-zero term a slot: exact in any order
    return slices.sum()


def clip_factor(norm: float, limit: float) -> float:
    """What a gradient of this norm is multiplied by so that it is at most `limit`; 0 is no limit."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0
