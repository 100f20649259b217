"""The norm of the gradient over the whole model, and the clip by it (arXiv:1211.5063).

A clip carries the norm's last bit into every weight, so that bit must not depend on the order of adding: on how the
gradient is cut into stages, slices, rows and buckets. Hence squares are added up to twice the digits of fp64, as a sum
and what its roundings lost (T. Ogita, S. Rump, S. Oishi, "Accurate sum and dot product", 2005), and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mega_trainer.comm import Group, all_gather
from mega_trainer.parallel.shared import Buffer

LANES = {"cpu": 1 << 16, "cuda": 1 << 22}  # sums kept side by side: what fits the cache; what keeps a GPU busy


def grad_norm(buffers: Sequence[Buffer], model_groups: Sequence[Group]) -> Tensor:
    """L2 norm over the whole model, each canonical element counted once; fp64 scalar, the same on all ranks.

    Args:
        buffers: this rank's, with their reduced gradients.
        model_groups: the groups over which different ranks hold different parameters, besides the buffers' `parts`.
    """
    zero = buffers[0].shards[0].grads.new_zeros(1, 2, dtype=torch.float64)
    held: dict[Group | None, dict[Group | None, list[Tensor]]] = {}
    for buffer in buffers:
        own = held.setdefault(buffer.kind.parts, {})
        if buffer.kind.counts_here:
            own.setdefault(buffer.kind.data if buffer.sharded else None, []).extend(s.grads for s in buffer.shards)
    sums = [zero]
    for parts, own in held.items():
        mine = _folded(torch.cat([zero, *(_gathered(sum_of_squares(grads), data) for data, grads in own.items())]))
        sums.append(_gathered(mine, parts))
    total = _folded(torch.cat(sums))
    for group in model_groups:
        total = _folded(all_gather(total, group))
    high, low = total[0]
    return torch.where(high.isfinite(), high + low, high).sqrt()


def _gathered(sums: Tensor, group: Group | None) -> Tensor:
    return sums if group is None else all_gather(sums, group)


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """[1, 2] fp64: the sum of the squares of all elements, and what is to be added to it for the digits beyond."""
    device = tensors[0].device
    lanes = min(LANES[device.type], max(1, *(tensor.numel() for tensor in tensors)))
    high, low = torch.zeros(2, lanes, dtype=torch.float64, device=device)
    for part in (part for tensor in tensors for part in torch.split(tensor, lanes)):
        place = slice(part.numel())
        total, lost = _two_sum(high[place], part.double().square())
        high[place] = total
        low[place] += lost
    return _folded(torch.stack([high, low], 1))


def _folded(sums: Tensor) -> Tensor:
    """The total [1, 2] of sums [N, 2]."""
    high, low = sums[:, 0], sums[:, 1].sum()
    while len(high) > 1:
        first, second = pad(high, (0, len(high) % 2)).chunk(2)
        high, lost = _two_sum(first, second)
        low = low + lost.sum()
    return torch.stack([high, low.view(1)], 1)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b as it is rounded, and what the rounding lost, exactly."""
    total = a + b
    shown = total - a
    return total, (a - (total - shown)) + (b - shown)


def clip_factor(norm: float, limit: float) -> float:
    """What a gradient of this norm is multiplied by so that it is at most `limit`; 0 is no limit."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0
