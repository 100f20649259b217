"""Products of consecutive rows with a matrix for each group of them, as experts need.

Legend: M rows, G groups, D input width, N output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.kernels import products


@dataclass(frozen=True)
class Rows:
    """Which of M rows belong to which group: the first few to group 0, and so on; a group may have none.

    Rows behind the last group's belong to none: they are in no product, and what a product has there is anything.

    Attributes:
        ends: int32 [G], where each group's rows end, on the device of the rows.
    """

    ends: Tensor

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> Rows:
        """From the number of rows of each group."""
        return cls(torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device))

    @cached_property
    def slices(self) -> list[slice]:
        """Each group's rows. The host waits for them."""
        return [slice(first, stop) for first, stop in pairwise([0, *self.ends.tolist()])]

    def group(self, count: int) -> Tensor:
        """int64 [M], the group of each of `count` rows; some group for rows of none."""
        every = torch.arange(count, dtype=torch.int32, device=self.ends.device)
        return torch.searchsorted(self.ends, every, right=True).clamp(max=len(self.ends) - 1)


def product(x: Tensor, weight: Tensor, rows: Rows) -> Tensor:
    """Each row times its group's matrix: [M, D] x [G, D, N] -> [M, N]."""
    if _at_once(x, weight.shape[-1]):
        y: Tensor = F.grouped_mm(x, weight, offs=rows.ends)
        return y
    y = x.new_empty(x.shape[0], weight.shape[-1])
    for matrix, own in zip(weight, rows.slices, strict=True):
        torch.mm(x[own], matrix, out=y[own])
    return y


def outer(y: Tensor, x: Tensor, rows: Rows, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """The sum of outer products of each group's rows, zero where it has none: [M, N] x [M, D] -> [G, N, D].

    `out` and `add` as for `products.product`.
    """
    if _at_once(x, y.shape[-1]):
        sums: Tensor = F.grouped_mm(y.t(), x, offs=rows.ends)
        if not _zero_without_rows(x.device):
            empty = rows.ends.diff(prepend=rows.ends.new_zeros(1)) == 0
            sums.masked_fill_(empty.view(-1, 1, 1), 0.0)
        return sums if out is None else products.put(out, sums, add=add)
    if out is None:
        out = x.new_empty(len(rows.ends), y.shape[-1], x.shape[-1])
    if x.is_meta:  # the planner's, which wants shapes alone: no rows are there to be counted
        return out
    for matrix, own in zip(out, rows.slices, strict=True):
        products.product(y[own].t(), x[own], matrix, add=add)
    return out


def _at_once(x: Tensor, width: int) -> bool:
    """Whether torch has one kernel for all groups: for bf16 on a GPU, where rows are multiples of 16 bytes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0 and width % 8 == 0


def _zero_without_rows(device: torch.device) -> bool:
    """Whether the kernel's sum of no rows is zero: Hopper's; Blackwell's is anything (pytorch issue 172439)."""
    return torch.cuda.get_device_capability(device)[0] == 9
