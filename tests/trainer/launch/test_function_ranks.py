"""Results of ranks arrive at once or one by one; errors and ranks that wait for each other are named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import PRELOAD, run_ranks

from mega_trainer.launch.function_ranks import RankError, iterate_rank_results


def count_steps(steps: int, failing: int, hanging: int) -> Iterator[int]:
    for step in range(steps):
        if step == failing and dist.get_rank() == 1:
            raise ValueError(f"step {step}")
        if step == hanging and dist.get_rank() == 1:
            dist.all_reduce(torch.zeros(1))
        yield step + 10 * dist.get_rank()


def test_items_arrive_by_rank_and_an_error_or_a_hang_comes_after_those_before_it() -> None:
    found = list(iterate_rank_results(count_steps, 2, 3, -1, -1, preload=PRELOAD))
    assert found == [[0, 10], [1, 11], [2, 12]]
    assert run_ranks(count_steps, 2, 3, -1, -1) == [[0, 1, 2], [10, 11, 12]]
    items = iterate_rank_results(count_steps, 2, 3, 1, -1, preload=PRELOAD)
    assert next(items) == [0, 10]
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2.*ValueError: step 1"):
        next(items)


def test_a_rank_that_waits_for_others_is_named() -> None:
    run_ranks(count_steps, 2, 1, -1, -1)  # with the imports of the ranks, which would take part of the timeout below
    with pytest.raises(TimeoutError, match=r"ranks \[1\] are not done"):
        list(iterate_rank_results(count_steps, 2, 2, -1, 1, timeout=20, preload=PRELOAD))
