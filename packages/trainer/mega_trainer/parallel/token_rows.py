"""Rows for the choices of tokens, sorted by group, and their sums for the tokens they belong to.

    choices [N, K]   -> rows sorted by group       gather   x [N, D] -> [M + 1, D]
    rows             -> one sum for each token     collect  y [M + 1, D] -> [N, D]

Each is the gradient of the other, one kernel that reads rows and writes rows; no [N, K, D] is ever made, and sums are in
the order of the choices: a scattered sum would add in any order on a GPU. Shapes never depend on the tokens, so nothing
waits for the device. There may be more rows than choices that have a group: the others belong to no group, and the last
one never does, so that a choice without a row has one to point at. What such rows hold, even if it is not a number, goes
nowhere.

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


def pick_token_rows(x: Tensor, slots: RowAssignment) -> Tensor:
    """Return the token of each row, x [N, ..] -> [M + 1, ..]; a row without a token has an arbitrary one."""
    return x[slots.token_of_row]


def sum_choice_rows(rows: Tensor, numbers: Tensor) -> Tensor:
    """Return for each token the sum of rows [M + 1, D] with the numbers int64 [N, K]; the last row counts as zero."""
    return F.embedding_bag(numbers, rows, mode="sum", padding_idx=len(rows) - 1)


@dataclass(frozen=True)
class RowAssignment:
    """Assignment of choices to rows.

    Attributes:
        row: int64 [N, K], the row of each choice, M where it has none.
        choice: int64 [M + 1], the choice of each row, counted through [N, K]; -1 where it has none.
        ends: int32 [G], where each group's rows end.
        dropped: int64, choices of a group that found no row.
        pick, sum: as `pick_token_rows` and `summed`, which may make what they return at a place of their own.
    """

    row: Tensor
    choice: Tensor
    ends: Tensor
    dropped: Tensor
    pick_rows: Callable[[Tensor, RowAssignment], Tensor] = pick_token_rows
    sum_rows: Callable[[Tensor, Tensor], Tensor] = sum_choice_rows

    @classmethod
    def assign_rows(cls, groups: Tensor, count: int, rows: int, capacity: int | Tensor | None = None) -> RowAssignment:
        """Assign rows to the choices of `groups`, int64 [N, K], each one of `count` or -1.

        Sorted by group, and then by token and choice: one after the other, or with a `capacity` each group behind as many
        rows as those before it may have, and no more of it than that. What comes too late is lost.

        Args:
            groups: what was chosen.
            count: G.
            rows: M.
            capacity: rows of every group, or int64 [G], of each.
        """
        flat, device = groups.flatten(), groups.device
        sorted_groups, order = torch.where(flat < 0, count, flat).sort(stable=True)
        at, there = torch.arange(len(flat), device=device), sorted_groups < count
        if capacity is not None:
            room = capacity if isinstance(capacity, Tensor) else flat.new_full((count,), capacity)
            at = at - torch.searchsorted(sorted_groups, sorted_groups)
            there = there & (at < F.pad(room, (0, 1))[sorted_groups])
            at = at + F.pad(room.cumsum(0), (1, 0))[sorted_groups]
        at = torch.where(there & (at < rows), at, rows)
        row = torch.empty_like(at).scatter_(0, order, at)
        choice = torch.full((rows + 1,), -1, device=device).scatter_(0, at, order)
        choice[-1] = -1
        ends = torch.searchsorted(sorted_groups, torch.arange(count, device=device), right=True).clamp(max=rows)
        lost = (flat >= 0).sum() - (row < rows).sum()
        return cls(row.view_as(groups), choice, ends.int(), lost)

    def truncate_rows(self, rows: int) -> RowAssignment:
        """Return the assignment with fewer rows, where the removed ones have no choice."""
        return replace(self, row=self.row.clamp(max=rows), choice=self.choice[: rows + 1])

    @property
    def row_count(self) -> int:
        """Number of rows, M."""
        return len(self.choice) - 1

    @property
    def token_of_row(self) -> Tensor:
        """Token of each row, int64 [M + 1], an arbitrary one for rows without a choice."""
        return self.choice.clamp(min=0) // self.row.shape[1]


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: RowAssignment) -> Tensor:
        ctx.slots = slots
        return slots.pick_rows(x, slots) if len(x) else x.new_empty((slots.row_count + 1, *x.shape[1:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.slots.sum_rows(dy, ctx.slots.row), None


class _SumTokenRows(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, slots: RowAssignment) -> Tensor:
        ctx.slots = slots
        return slots.sum_rows(y, slots.row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.slots.pick_rows(dy, ctx.slots), None


class _PickChoiceValues(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, slots: RowAssignment) -> Tensor:
        ctx.slots = slots
        return values.flatten()[slots.choice.clamp(min=0)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        row = ctx.slots.row
        return dy[row].masked_fill(row == ctx.slots.row_count, 0.0), None


def gather_token_rows(x: Tensor, slots: RowAssignment) -> Tensor:
    """Return the token of each row: [N, D] -> [M + 1, D]."""
    y: Tensor = _GatherRows.apply(x, slots)  # type: ignore[no-untyped-call]
    return y


def sum_token_rows(y: Tensor, slots: RowAssignment) -> Tensor:
    """Return for each token the sum of its rows: [M + 1, D] -> [N, D], zero for a token without any."""
    x: Tensor = _SumTokenRows.apply(y, slots)  # type: ignore[no-untyped-call]
    return x


def pick_choice_values(values: Tensor, slots: RowAssignment) -> Tensor:
    """Return the value of each row's choice: [N, K] -> [M + 1]."""
    y: Tensor = _PickChoiceValues.apply(values, slots)  # type: ignore[no-untyped-call]
    return y
