"""The norm of the gradient over the whole model, and the clip by it (arXiv:1211.5063).

A clip carries the norm's last bit into every weight, so that bit must not depend on the order of adding: on how the
gradient is cut into stages, slices, rows and buckets. Hence squares are added up to twice the digits of fp64, as a sum
and what its roundings lost (T. Ogita, S. Rump, S. Oishi, "Accurate sum and dot product", 2005), and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mega_trainer.comm import Group, all_gather
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.parallel.shared import Buffer

ROWS = 64  # elements that a sum takes in at once: as many as a kernel adds up in registers
# Sums side by side, fewest and most: on a CPU what pays for the calls and fits its cache, on a GPU what keeps it busy.
WIDTHS = {"cpu": (1 << 10, 1 << 15), "cuda": (1, 1 << 22)}


def grad_norm(buffers: Sequence[Buffer], model_groups: Sequence[Group], leaves: Leaves) -> Tensor:
    """L2 norm over the whole model, each canonical element counted once; fp64 scalar, the same on all ranks.

    Args:
        buffers: this rank's, with their reduced gradients.
        model_groups: the groups over which different ranks hold different parameters, besides the buffers' `parts`.
        leaves: calls what adds up.
    """
    zero = buffers[0].shards[0].grads.new_zeros(1, 2, dtype=torch.float64)
    held: dict[Group | None, dict[Group | None, list[Tensor]]] = {}
    for buffer in buffers:
        own = held.setdefault(buffer.kind.parts, {})
        if buffer.kind.counts_here:
            own.setdefault(buffer.kind.data if buffer.sharded else None, []).extend(s.grads for s in buffer.shards)
    sums = [zero]
    for parts, own in held.items():
        mine = _folded(
            torch.cat([zero, *(_gathered(sum_of_squares(grads, leaves), data) for data, grads in own.items())])
        )
        sums.append(_gathered(mine, parts))
    total = _folded(torch.cat(sums))
    for group in model_groups:
        total = _folded(all_gather(total, group))
    high, low = total[0]
    return torch.where(high.isfinite(), high + low, high).sqrt()


def _gathered(sums: Tensor, group: Group | None) -> Tensor:
    return sums if group is None else all_gather(sums, group)


def sum_of_squares(tensors: Sequence[Tensor], leaves: Leaves) -> Tensor:
    """[1, 2] fp64: the sum of the squares of all elements, and what is to be added to it for the digits beyond."""
    fewest, _ = WIDTHS[tensors[0].device.type]
    sums = torch.cat([leaves(add_squares, block) for block in _blocks(tensors)], 1)
    while sums.shape[1] > ROWS * fewest:
        over = -sums.shape[1] % ROWS
        sums = leaves(add_sums, (pad(sums, (0, over)) if over else sums).view(2, ROWS, -1))
    return _folded(sums.t())


def _blocks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """All elements, as matrices of `ROWS` rows: views, and of what is left over copies filled up with zeros."""
    fewest, most = WIDTHS[tensors[0].device.type]
    rest = []
    for part in (part for tensor in tensors for part in torch.split(tensor, ROWS * most)):
        whole = len(part) // (ROWS * fewest) * (ROWS * fewest)
        if whole:
            yield part[:whole].view(ROWS, -1)
        rest.append(part[whole:])
    for part in torch.split(
        torch.cat([*rest, rest[0].new_zeros(1)]), ROWS * most
    ):  # there is one, of no elements at all
        yield pad(part, (0, -len(part) % ROWS)).view(ROWS, -1)


def add_squares(values: Tensor) -> Tensor:
    """[R, N] -> fp64 [2, N]: the sums of the squares of each column, and what their roundings lost.

    `_two_sum` in place: what it takes on a CPU is mostly new memory.
    """
    high = values[0].double().square()
    low = torch.zeros_like(high)
    for row in values[1:]:
        square = row.to(torch.float64, copy=True).square_()
        total = high + square
        shown = total - high
        low.add_(high.sub_(total - shown).add_(square.sub_(shown)))
        high = total
    return torch.stack([high, low])


def add_sums(sums: Tensor) -> Tensor:
    """[2, R, N] sums and what they lost -> [2, N], those of each column."""
    high, low = sums[0, 0], sums[1, 0]
    for more, lost in zip(sums[0, 1:], sums[1, 1:], strict=True):
        high, rounding = _two_sum(high, more)
        low = low + lost + rounding
    return torch.stack([high, low])


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
