from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_common.errors import DataError
from mega_data.sampling.weighted_blend import MegatronBlend, StableBlend, build_megatron_blend

WEIGHTS = st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=20)


def greedy(shares: np.ndarray, size: int) -> tuple[list[int], list[int]]:
    """Megatron's rule, one sample at a time."""
    counts, datasets, numbers = np.zeros(len(shares), np.int64), [], []
    for i in range(size):
        best = int(np.argmax(shares * max(i, 1) - counts))
        datasets.append(best)
        numbers.append(int(counts[best]))
        counts[best] += 1
    return datasets, numbers


@given(WEIGHTS, st.integers(1, 700))
@settings(max_examples=80, deadline=None)
def test_blocks_side_by_side_give_the_greedy_chain(weights: list[float], size: int) -> None:
    shares = np.array(weights) / np.sum(weights)
    built = build_megatron_blend(shares, size)
    assert (built["dataset"].tolist(), built["sample"].tolist()) == greedy(shares, size)


@pytest.mark.parametrize(
    "weights",
    [[1, 1, 1], [0.3, 0.7], [1e-6, 1e-3, 1], [0.5, 0.25, 0.125, 0.125], [1] * 64, np.geomspace(1e-6, 1, 30).tolist()],
    ids=["even", "two", "tiny", "halves", "many", "steep"],
)
def test_same_bits_as_megatrons_helper(weights: list[float]) -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="the oracle is not installed")
    size, shares = 100_000, np.array(weights, np.float64) / np.sum(weights)
    dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(dataset, sample, shares.tolist(), len(weights), size, False)
    built = build_megatron_blend(shares, size)
    assert np.array_equal(built["dataset"], dataset)
    assert np.array_equal(built["sample"], sample)


def test_megatron_sizes_and_end(tmp_path: Path) -> None:
    blend = MegatronBlend([3, 7], 1001, tmp_path)
    assert blend.sizes == [303, 705]  # ceil(ceil(300.3) * 1.005), ceil(ceil(700.7) * 1.005)
    assert len(blend) == 301 + 701
    with pytest.raises(DataError, match="fixed for 1002 samples, and sample 1002"):
        blend.locate_sample(1002)


@given(WEIGHTS, st.integers(1, 500))
@settings(max_examples=80, deadline=None)
def test_stable_blend_uses_each_number_once_and_keeps_the_shares(weights: list[float], size: int) -> None:
    blend = StableBlend(weights)
    counts, depth = np.zeros(len(weights)), (len(weights) - 1).bit_length()
    for k in range(size):
        dataset, number = blend.locate_sample(k)
        assert number == counts[dataset]
        counts[dataset] += 1
        assert np.all(np.abs(counts - (k + 1) * np.array(weights) / np.sum(weights)) <= depth + 1e-6)


@given(WEIGHTS, st.integers(0, 10**15))
@settings(max_examples=50, deadline=None)
def test_stable_blend_far_out(weights: list[float], k: int) -> None:
    blend = StableBlend(weights)
    dataset, number = blend.locate_sample(k)
    share = weights[dataset] / np.sum(weights)
    assert abs(number - k * share) <= 6 + 20 * k / 2**53


def test_stable_blend_is_fixed_for_ever() -> None:
    """A change of these numbers breaks the resume of every run."""
    blend = StableBlend([0.7, 0.3, 0.5])
    assert [blend.locate_sample(k) for k in (0, 1, 2, 3, 4, 10**12)] == [
        (2, 0),
        (0, 0),
        (1, 0),
        (0, 1),
        (2, 1),
        (2, 333333333333),
    ]
