"""Rows for choices, against loops."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mega_trainer.parallel.token_rows import (
    ExpertRowAssignment,
    gather_choice_values,
    gather_token_rows,
    sum_token_rows,
)

GROUPS = 3
choices = st.lists(st.lists(st.integers(-1, GROUPS - 1), min_size=2, max_size=2), min_size=1, max_size=6)


def test_rows_are_sorted_by_group_and_then_by_token() -> None:
    slots = ExpertRowAssignment.assign_rows(torch.tensor([[3, 0], [-1, 3], [0, -1]]), 4, 6)
    assert slots.choice.tolist() == [1, 4, 0, 3, -1, -1, -1]
    assert slots.row.tolist() == [[2, 0], [6, 3], [1, 6]]
    assert slots.ends.tolist() == [2, 2, 2, 4]


def test_groups_begin_at_multiples_of_a_capacity() -> None:
    slots = ExpertRowAssignment.assign_rows(torch.tensor([[3, 0], [0, 3], [0, -1]]), 4, 8, 2)
    assert slots.choice.tolist() == [1, 2, -1, -1, -1, -1, 0, 3, -1]
    assert slots.row.tolist() == [[6, 0], [1, 7], [8, 8]]
    assert slots.dropped == 1


def test_groups_have_room_of_their_own() -> None:
    slots = ExpertRowAssignment.assign_rows(torch.tensor([[3, 0], [0, 3], [0, -1]]), 4, 6, torch.tensor([2, 0, 0, 1]))
    assert slots.choice.tolist() == [1, 2, 0, -1, -1, -1, -1]
    assert slots.row.tolist() == [[2, 0], [1, 6], [6, 6]]
    assert slots.dropped == 2


def test_a_rank_without_tokens_has_rows_that_no_token_fills() -> None:
    slots = ExpertRowAssignment.assign_rows(torch.empty((0, 2), dtype=torch.int64), GROUPS, 3)
    x, y, values = (torch.ones(shape, requires_grad=True) for shape in ((0, 4), (4, 4), (0, 2)))
    gathered, summed, picked = (
        gather_token_rows(x, slots),
        sum_token_rows(y, slots),
        gather_choice_values(values, slots),
    )
    assert [tuple(result.shape) for result in (gathered, summed, picked)] == [(4, 4), (0, 4), (4,)]
    (gathered.sum() + summed.sum() + picked.sum()).backward()
    assert [leaf.grad is not None and leaf.grad.shape for leaf in (x, y, values)] == [(0, 4), (4, 4), (0, 2)]


def of_rows(chosen: list[list[int]], group: int) -> list[int]:
    return [token for token, row in enumerate(chosen) for one in row if one == group]


@given(choices)
def test_each_choice_gets_a_row_and_each_token_their_sum(chosen: list[list[int]]) -> None:
    table = torch.tensor(chosen)
    slots = ExpertRowAssignment.assign_rows(table, GROUPS, table.numel())
    rows = [token for group in range(GROUPS) for token in of_rows(chosen, group)]
    x = torch.randn(len(chosen), 4, dtype=torch.float64)
    torch.testing.assert_close(gather_token_rows(x, slots)[: len(rows)], x[rows])
    y = torch.full((slots.row_count + 1, 4), torch.nan, dtype=torch.float64)  # what belongs to no group goes nowhere
    y[: len(rows)] = torch.randn(len(rows), 4, dtype=torch.float64)
    expected = torch.zeros_like(x).index_add_(0, torch.tensor(rows, dtype=torch.int64), y[: len(rows)])
    torch.testing.assert_close(sum_token_rows(y, slots), expected)


@given(choices)
def test_gradients(chosen: list[list[int]]) -> None:
    table = torch.tensor(chosen)
    slots = ExpertRowAssignment.assign_rows(table, GROUPS, table.numel())
    x, weights = (torch.randn(len(chosen), width, dtype=torch.float64, requires_grad=True) for width in (3, 2))
    there = torch.zeros(slots.row_count + 1, 1, dtype=torch.float64)
    there[: int(slots.ends[-1])] = 1

    def round_trip(x: Tensor, weights: Tensor) -> Tensor:
        return sum_token_rows(
            gather_token_rows(x, slots) * gather_choice_values(weights, slots).unsqueeze(-1) * there, slots
        )

    assert torch.autograd.gradcheck(round_trip, (x, weights))
