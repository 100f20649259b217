"""Grouped GEMM: consecutive rows multiplied by one matrix per group, as for experts.

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

from mega_trainer.distributed.device import to_host
from mega_trainer.kernels import gemm_accumulation


@dataclass(frozen=True)
class GroupedRows:
    """Assignment of consecutive rows to groups (experts) for a grouped GEMM, by the end of each group's rows.
    The first rows belong to group 0, the next to group 1, and so on; a group may be empty.

    Rows after those of the last group belong to no group: GEMMs skip them, and their outputs are arbitrary.

    Attributes:
        ends: int32 [G], end of each group's rows, on the device of the rows.
    """

    ends: Tensor

    @classmethod
    def from_counts(cls, counts: Sequence[int], device: torch.device) -> GroupedRows:
        """Return the assignment of rows to groups (experts) with given numbers of rows."""
        return cls(torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device))

    @cached_property
    def group_slices(self) -> list[slice]:
        """Slice of each group's rows. The host waits for the device."""
        return [slice(first, stop) for first, stop in pairwise([0, *to_host(self.ends).tolist()])]

    def group_of_rows(self, count: int) -> Tensor:
        """Return the group number of each of `count` rows, int64 [count]; arbitrary for rows after the last group."""
        every = torch.arange(count, dtype=torch.int32, device=self.ends.device)
        return torch.searchsorted(self.ends, every, right=True).clamp(max=len(self.ends) - 1)


def grouped_gemm(x: Tensor, weight: Tensor, rows: GroupedRows) -> Tensor:
    """Multiply each row of x by its group's matrix: [M rows, D] x [G groups, D, N] -> [M, N]."""
    if _has_grouped_kernel(x, weight.shape[-1]):
        y: Tensor = F.grouped_mm(x, weight, offs=rows.ends)
        return y
    y = x.new_empty(x.shape[0], weight.shape[-1])
    for matrix, own in zip(weight, rows.group_slices, strict=True):
        torch.mm(x[own], matrix, out=y[own])
    return y


def grouped_wgrad_gemm(
    y: Tensor, x: Tensor, rows: GroupedRows, out: Tensor | None = None, *, add: bool = False
) -> Tensor:
    """Return the weight gradient of a grouped GEMM, y^T x over each group's rows, in or added to `out` if given.
    Shapes are [M, N] x [M, D] -> [G, N, D]; the gradient of an empty group is zero.

    `out` and `add` as for `gemm_accumulation.gemm_into`.
    """
    if _has_grouped_kernel(x, y.shape[-1]):
        sums: Tensor = F.grouped_mm(y.t(), x, offs=rows.ends)
        if not _zeroes_empty_groups(x.device):
            empty = rows.ends.diff(prepend=rows.ends.new_zeros(1)) == 0
            sums.masked_fill_(empty.view(-1, 1, 1), 0.0)
        return sums if out is None else gemm_accumulation.write_or_add_values(out, sums, add=add)
    if out is None:
        out = x.new_empty(len(rows.ends), y.shape[-1], x.shape[-1])
    if x.is_meta:  # in the planner: the row counts are unknown, and only shapes are needed
        return out
    for matrix, own in zip(out, rows.group_slices, strict=True):
        gemm_accumulation.gemm_into(y[own].t(), x[own], matrix, add=add)
    return out


def _has_grouped_kernel(x: Tensor, width: int) -> bool:
    """Return whether torch has one kernel for all groups: bf16 on a GPU, with rows of a multiple of 16 bytes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0 and width % 8 == 0


def _zeroes_empty_groups(device: torch.device) -> bool:
    """Return whether the kernel writes zeros for empty groups: on Hopper it does, on Blackwell the result is undefined.

    See pytorch issue 172439.
    """
    return torch.cuda.get_device_capability(device)[0] == 9
