"""Rows for the choices of tokens, sorted by group, and the sums of each token's rows.

    choices [N, K]   -> rows sorted by group       gather   x [N, D] -> [M + 1, D]
    rows             -> one sum per token          sum      y [M + 1, D] -> [N, D]

Each is the gradient of the other, one kernel that reads and writes rows. No [N, K, D] tensor is made, and sums are in the
order of the choices (a scattered sum would be in any order on a GPU). Shapes never depend on the tokens, so the host never
waits for the device. There may be more rows than choices with a group; the surplus rows belong to no group, and the last
row never does: choices without a row point to it. The values of such rows, even NaN, are never used.

Legend: N tokens, K choices of each, G groups (ranks, or experts), M rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def gather_token_rows_no_grad(x: Tensor, slots: ExpertRowAssignment) -> Tensor:
    """Return the token vector of each row of an expert-sorted buffer, without a gradient: x [N, ..] -> [M + 1, ..].
    A row without a token has an arbitrary one, and arbitrary values if there are no tokens.
    """
    return x[slots.token_of_row] if len(x) else x.new_empty((slots.row_count + 1, *x.shape[1:]))


def sum_choice_rows(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return the sum of each token's rows of [M + 1, D], by row numbers int64 [N, K]; the last row counts as zero."""
    return F.embedding_bag(numbers, rows, mode="sum", padding_idx=len(rows) - 1)


@dataclass(frozen=True)
class ExpertRowAssignment:
    """Assignment of tokens' choices of experts (or ranks) to rows sorted by expert (or rank), and its inverse.
    Choices over capacity have no row.

    Attributes:
        row: int64 [N, K], the row of each choice; M for a choice without a row.
        choice: int64 [M + 1], the flat index in [N, K] of each row's choice; -1 for a row without a choice.
        ends: int32 [G], end of each group's rows.
        dropped: int64, number of choices with a group that got no row.
        pick_rows, sum_rows: `gather_token_rows_no_grad` and `sum_choice_rows`, or versions that write into their own memory.
    """

    row: Tensor
    choice: Tensor
    ends: Tensor
    dropped: Tensor
    pick_rows: Callable[[Tensor, ExpertRowAssignment], Tensor] = gather_token_rows_no_grad
    sum_rows: Callable[[Tensor, Tensor], Tensor] = sum_choice_rows

    @classmethod
    def assign_rows(
        cls, groups: Tensor, count: int, rows: int, capacity: int | Tensor | None = None
    ) -> ExpertRowAssignment:
        """Assign rows sorted by group to the tokens' choices of groups (experts or ranks), none over the capacity.
        The choices in `groups`, int64 [N tokens, K], are each a group number below `count` or -1 for none.

        Rows are sorted by group, then by token and choice. With a `capacity` every group has a range of that many rows;
        choices beyond it, or beyond `rows`, are dropped.

        Args:
            groups: group of each choice.
            count: G.
            rows: M.
            capacity: rows of every group, or of each group, int64 [G].
        """
        flat, device = groups.flatten(), groups.device
        sorted_groups, order = torch.where(flat < 0, count, flat).sort(stable=True)
        at, valid = torch.arange(len(flat), device=device), sorted_groups < count
        if capacity is not None:
            limits = capacity if isinstance(capacity, Tensor) else flat.new_full((count,), capacity)
            at = at - torch.searchsorted(sorted_groups, sorted_groups)
            valid = valid & (at < F.pad(limits, (0, 1))[sorted_groups])
            at = at + F.pad(limits.cumsum(0), (1, 0))[sorted_groups]
        at = torch.where(valid & (at < rows), at, rows)
        row = torch.empty_like(at).scatter_(0, order, at)
        choice = torch.full((rows + 1,), -1, device=device).scatter_(0, at, order)
        choice[-1:].fill_(-1)  # assigning a number to one element copies it from the host, which waits
        ends = torch.searchsorted(sorted_groups, torch.arange(count, device=device), right=True).clamp(max=rows)
        dropped = (flat >= 0).sum() - (row < rows).sum()
        return cls(row.view_as(groups), choice, ends.int(), dropped)

    def truncate_rows(self, rows: int) -> ExpertRowAssignment:
        """Return the row assignment with only the first `rows` rows; the removed ones must be unassigned."""
        return replace(self, row=self.row.clamp(max=rows), choice=self.choice[: rows + 1])

    @property
    def row_count(self) -> int:
        """Number of rows that choices can be assigned to."""
        return len(self.choice) - 1

    @property
    def token_of_row(self) -> Tensor:
        """Token number of each row, int64 [M rows + 1]; arbitrary for rows without a choice."""
        return self.choice.clamp(min=0) // self.row.shape[1]


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: ExpertRowAssignment) -> Tensor:
        ctx.slots = slots
        return slots.pick_rows(x, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.slots.sum_rows(dy, ctx.slots.row), None


class _SumTokenRows(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, slots: ExpertRowAssignment) -> Tensor:
        ctx.slots = slots
        return slots.sum_rows(y, slots.row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.slots.pick_rows(dy, ctx.slots), None


class _PickChoiceValues(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: ExpertRowAssignment) -> Tensor:
        ctx.slots = slots
        # without tokens there is still one row, which no token fills
        return values.flatten()[slots.choice.clamp(min=0)] if len(values) else values.new_zeros(len(slots.choice))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        row = ctx.slots.row
        return dy[row].masked_fill(row == ctx.slots.row_count, 0.0), None


def gather_token_rows(x: Tensor, slots: ExpertRowAssignment) -> Tensor:
    """Return the token vector of each expert-sorted row, differentiable: x [N tokens, D] -> [M rows + 1, D]."""
    y: Tensor = _GatherRows.apply(x, slots)  # type: ignore[no-untyped-call]
    return y


def sum_token_rows(y: Tensor, slots: ExpertRowAssignment) -> Tensor:
    """Return the sum of each token's expert-sorted rows, differentiable: y [M rows + 1, D] -> [N tokens, D].
    The sum is zero for a token without rows.
    """
    x: Tensor = _SumTokenRows.apply(y, slots)  # type: ignore[no-untyped-call]
    return x


def gather_choice_values(values: Tensor, slots: ExpertRowAssignment) -> Tensor:
    """Return each expert-sorted row's value of its token and choice, such as a router weight; differentiable.

    values [N tokens, K] -> [M rows + 1]; the last row is unassigned.
    """
    y: Tensor = _PickChoiceValues.apply(values, slots)  # type: ignore[no-untyped-call]
    return y
