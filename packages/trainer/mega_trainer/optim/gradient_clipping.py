"""Gradient norm over the whole model, gradient clipping (arXiv:1211.5063) and the loss scale of fp16.

Clipping carries the norm's last bit into every weight, so that bit must not depend on the order of summation: on how the
gradient is cut into stages, slices, rows and buckets. So the squares are summed with twice the digits of fp64, as a sum
and its rounding error (T. Ogita, S. Rump, S. Oishi, "Accurate sum and dot product", 2005), and rounded once.

The module also has the loss scale, without which fp16 loses small gradients (arXiv:1710.03740).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mega_trainer.distributed.comm import CommGroup, all_gather
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.parallel.parameter_shards import ParameterBuffer

ROWS = 64  # elements added to each sum at once: as many as a kernel adds up in registers
# Least and most parallel sums: on a CPU enough to hide the cost of calls yet fit its cache, on a GPU enough to fill it.
WIDTHS = {"cpu": (1 << 10, 1 << 15), "cuda": (1, 1 << 22)}


def compute_grad_norm(
    buffers: Sequence[ParameterBuffer], model_groups: Sequence[CommGroup], leaves: FusibleFunctionCompiler
) -> Tensor:
    """Return the L2 norm of the gradients over the whole model, an fp64 scalar equal on all ranks.
    Each element of a canonical tensor is counted once.

    Args:
        buffers: this rank's buffers, with their reduced gradients.
        model_groups: the groups whose ranks hold different parameters, in addition to the buffers' `parts`.
        leaves: calls the fusible functions that sum.
    """
    zero = buffers[0].shards[0].grads.new_zeros(1, 2, dtype=torch.float64)
    by_group: dict[CommGroup | None, dict[CommGroup | None, list[Tensor]]] = {}
    for buffer in buffers:
        own = by_group.setdefault(buffer.kind.parts, {})
        if buffer.kind.counts_in_norms:
            own.setdefault(buffer.kind.data if buffer.sharded else None, []).extend(s.grads for s in buffer.shards)
    sums = [zero]
    for parts, own in by_group.items():
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


def sum_of_squares(tensors: Sequence[Tensor], leaves: FusibleFunctionCompiler) -> Tensor:
    """Return the sum of the squares of all elements, fp64 [1, 2]: the sum, and a correction with its lower digits."""
    fewest, _ = WIDTHS[tensors[0].device.type]
    sums = torch.cat([leaves(sum_squares_with_compensation, block) for block in _split_blocks(tensors)], 1)
    while sums.shape[1] > ROWS * fewest:
        over = -sums.shape[1] % ROWS
        sums = leaves(add_compensated_sums, (pad(sums, (0, over)) if over else sums).view(2, ROWS, -1))
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
    rest.append(rest[0].new_zeros(1))  # so that there is a block even without elements
    for part in torch.split(torch.cat(rest), ROWS * most):
        yield pad(part, (0, -len(part) % ROWS)).view(ROWS, -1)


def sum_squares_with_compensation(values: Tensor) -> Tensor:
    """Map values [R, N] to fp64 [2, N]: the sum of squares of each column, and the rounding error of that sum.

    Does `_two_sum` in place, whose time on a CPU is mostly that of new memory.
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


def add_compensated_sums(sums: Tensor) -> Tensor:
    """Add R partial sums of each of N columns without losing their rounding errors: [2, R, N] -> [2, N].
    Index 0 of the first dimension has the sums, index 1 their rounding errors."""
    high, low = sums[0, 0], sums[1, 0]
    for more, error in zip(sums[0, 1:], sums[1, 1:], strict=True):
        high, rounding = _two_sum(high, more)
        low = low + error + rounding
    return torch.stack([high, low])


def _fold_sums(sums: Tensor) -> Tensor:
    """Return the total [1, 2] of sums [N, 2]."""
    high, low = sums[:, 0], sums[:, 1].sum()
    while len(high) > 1:
        first, second = pad(high, (0, len(high) % 2)).chunk(2)
        high, errors = _two_sum(first, second)
        low = low + errors.sum()
    return torch.stack([high, low.view(1)], 1)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b as rounded, and its exact rounding error."""
    total = a + b
    shown = total - a
    return total, (a - (total - shown)) + (b - shown)


def gradient_clip_factor(norm: float, limit: float) -> float:
    """Return the factor for the gradients, at most 1, that limits their norm from `norm` to `limit`.
    A limit of 0 disables clipping.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


@dataclass
class LossScale:
    """Dynamic loss scale for fp16 training, halved on overflow and doubled after steps without overflow.
    It is a factor on the loss before it is differentiated; it doubles after `growth_interval` steps.

    A power of two changes no bits except those that fp16 would lose.

    Attributes:
        value: factor of the next step.
        growth_interval: steps without overflow before the scale doubles.
        minimum: lower bound.
        good_steps: steps since the scale last changed.
    """

    value: float = 65536.0
    growth_interval: int = 1000
    minimum: float = 1.0
    good_steps: int = 0

    def can_fix_overflow(self, *, loss_finite: bool, norm_finite: bool) -> bool:
        """Return whether a smaller scale may fix an overflow: loss finite, gradient norm not, scale above minimum."""
        return loss_finite and not norm_finite and self.value > self.minimum

    def update_scale(self, *, overflowed: bool) -> None:
        """Halve the loss scale after a step with overflow; double it after `growth_interval` steps without."""
        self.good_steps = 0 if overflowed else self.good_steps + 1
        if overflowed:
            self.value = max(self.minimum, self.value / 2)
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0
