from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_data.sampling.document_order import permute_index, permute_indices


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=50, deadline=None)
def test_permuted_is_a_permutation(n: int, key: int) -> None:
    assert sorted(permute_index(i, n, key) for i in range(n)) == list(range(n))


@pytest.mark.parametrize("n", [2, 3, 5, 16, 37])
def test_permuted_sends_each_place_everywhere_equally_often(n: int) -> None:
    keys = 200 * n
    counts = np.zeros((n, n))
    for key in range(keys):
        for i in range(n):
            counts[i, permute_index(i, n, key)] += 1
    expected = keys / n
    chi_square_per_degree = ((counts - expected) ** 2 / expected).sum() / (n - 1) ** 2
    assert chi_square_per_degree < 2.5


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=50, deadline=None)
def test_many_at_once_are_each_by_itself(n: int, key: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), max_size=50))
    assert permute_indices(np.array(places, np.int64), n, key).tolist() == [permute_index(i, n, key) for i in places]


def test_many_at_once_far_out() -> None:
    n, key = 10**12 + 7, 2**64 - 3
    assert permute_indices(np.array([0, 5, n - 1]), n, key).tolist() == [
        permute_index(i, n, key) for i in (0, 5, n - 1)
    ]
