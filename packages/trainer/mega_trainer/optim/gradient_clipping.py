"""Gradient norm over the whole model, and gradient clipping (arXiv:1211.5063).

A clip carries the norm's last bit into every weight, so that bit must not depend on the order of adding: on how the
gradient is cut into stages, slices, rows and buckets. Hence squares are added up to twice the digits of fp64, as a sum
and what its roundings lost (T. Ogita, S. Rump, S. Oishi, "Accurate sum and dot product", 2005), and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from mega_trainer.distributed.comm import CommGroup, all_gather
from mega_trainer.kernels.leaf_compiler import LeafCompiler
from mega_trainer.parallel.parameter_shards import ParameterBuffer

ROWS = 64  # elements that a sum takes in at once: as many as a kernel adds up in registers
# Sums side by side, fewest and most: on a CPU what pays for the calls and fits its cache, on a GPU what keeps it busy.
WIDTHS = {"cpu": (1 << 10, 1 << 15), "cuda": (1, 1 << 22)}


def compute_grad_norm(
    buffers: Sequence[ParameterBuffer], model_groups: Sequence[CommGroup], leaves: LeafCompiler
) -> Tensor:
    """Return the L2 norm over the whole model, each canonical element counted once; fp64 scalar, equal on all ranks.

    Args:
        buffers: this rank's, with their reduced gradients.
        model_groups: the groups over which different ranks hold different parameters, besides the buffers' `parts`.
        leaves: calls what adds up.
    """
    zero = buffers[0].shards[0].grads.new_zeros(1, 2, dtype=torch.float64)
    held: dict[CommGroup | None, dict[CommGroup | None, list[Tensor]]] = {}
    for buffer in buffers:
        own = held.setdefault(buffer.kind.parts, {})
        if buffer.kind.counts_in_norms:
            own.setdefault(buffer.kind.data if buffer.sharded else None, []).extend(s.grads for s in buffer.shards)
    sums = [zero]
    for parts, own in held.items():
        mine = _fold_sums(
            torch.cat([zero, *(_all_gather(sum_of_squares(grads, leaves), data) for data, grads in own.items())])
        )
        sums.append(_all_gather(mine, parts))
    total = _fold_sums(torch.cat(sums))
    for group in model_groups:
        total = _fold_sums(all_gather(total, group))
    high, low = total[0]
    return torch.where(high.isfinite(), high + low, high).sqrt()


def _all_gather(sums: Tensor, group: CommGroup | None) -> Tensor:
    return sums if group is None else all_gather(sums, group)


def sum_of_squares(tensors: Sequence[Tensor], leaves: LeafCompiler) -> Tensor:
    """Return [1, 2] fp64: the sum of the squares of all elements, and the correction with its lower digits."""
    fewest, _ = WIDTHS[tensors[0].device.type]
    sums = torch.cat([leaves(accumulate_squares, block) for block in _split_blocks(tensors)], 1)
    while sums.shape[1] > ROWS * fewest:
        over = -sums.shape[1] % ROWS
        sums = leaves(accumulate_sums, (pad(sums, (0, over)) if over else sums).view(2, ROWS, -1))
    return _fold_sums(sums.t())


def _split_blocks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all elements as matrices of `ROWS` rows: views, and zero-padded copies of the remainders."""
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


def accumulate_squares(values: Tensor) -> Tensor:
    """Map [R, N] to fp64 [2, N]: the sums of the squares of each column, and their rounding errors.

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


def accumulate_sums(sums: Tensor) -> Tensor:
    """Map sums and their rounding errors [2, R, N] to those of each column, [2, N]."""
    high, low = sums[0, 0], sums[1, 0]
    for more, lost in zip(sums[0, 1:], sums[1, 1:], strict=True):
        high, rounding = _two_sum(high, more)
        low = low + lost + rounding
    return torch.stack([high, low])


def _fold_sums(sums: Tensor) -> Tensor:
    """Return the total [1, 2] of sums [N, 2]."""
    high, low = sums[:, 0], sums[:, 1].sum()
    while len(high) > 1:
        first, second = pad(high, (0, len(high) % 2)).chunk(2)
        high, lost = _two_sum(first, second)
        low = low + lost.sum()
    return torch.stack([high, low.view(1)], 1)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b as rounded, and its exact rounding error."""
    total = a + b
    shown = total - a
    return total, (a - (total - shown)) + (b - shown)


def gradient_clip_factor(norm: float, limit: float) -> float:
    """Return the factor that limits a gradient of this norm to `limit`; 0 is no limit."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0
