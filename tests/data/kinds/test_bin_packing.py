from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_data.kinds.bin_packing import pack_best_fit


def one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """The rooms that are left, by the definition."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= size]
        if not fitting:
            rooms.append(capacity)
        rooms[min(fitting)[1] if fitting else -1] -= size
    return sorted(rooms)


@given(st.integers(1, 70), st.lists(st.integers(1, 70), max_size=120))
@settings(max_examples=150, deadline=None)
def test_items_of_a_size_at_once_fit_as_one_by_one(capacity: int, drawn: list[int]) -> None:
    sizes = [size for size in drawn if size <= capacity]
    bins = pack_best_fit(np.array(sizes, np.int64), capacity)
    rooms = capacity - np.bincount(bins, sizes) if sizes else np.empty(0)
    assert sorted(rooms.astype(int).tolist()) == one_by_one(sizes, capacity)


def test_equal_items_go_to_bins_in_their_order() -> None:
    assert pack_best_fit(np.array([2, 3, 2, 3, 1]), 6).tolist() == [1, 0, 1, 0, 1]
