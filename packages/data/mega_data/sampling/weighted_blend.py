"""Weighted blends: the data set of sample k, and the sample's number in that data set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.sampling.index_cache import Arrays, load_or_build_arrays

ONE = 1 << 53
BlendTree: TypeAlias = "int | tuple[int, BlendTree, BlendTree]"


class StableBlend:
    """Weighted blend of data sets as a pure function of weights and sample number.
    It needs no fixed total and no index to build.

    The data sets are the leaves of a binary tree. At a node with a share r of its weight on the left, the first k
    samples contain floor(r k + 1/2) samples of the left branch, in integers. Sample k goes left if that number rises at
    k, and its number within the branch is that number (or the rest, on the right). Among the first k samples, each data
    set has its weighted share to within the depth of the tree.

    >>> [StableBlend([2, 1]).locate_sample(k) for k in range(6)]
    [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._tree = _build_tree(list(weights), 0)
        self.content_key = f"stable {list(weights)}"

    def locate_sample(self, k: int) -> tuple[int, int]:
        """Return (index of the data set that blend sample `k` comes from, number of the sample within that data set)."""
        node = self._tree
        while not isinstance(node, int):
            share, left, right = node
            before, after = (k * share + ONE // 2) // ONE, ((k + 1) * share + ONE // 2) // ONE
            node, k = (left, before) if after > before else (right, k - before)
        return node, k

    def count_samples(self, k: int) -> list[int]:
        """Return, for each data set, the number of its samples among the first `k` samples of the blend."""
        return list(_count_leaves(self._tree, k))


def _count_leaves(node: BlendTree, k: int) -> Iterator[int]:
    if isinstance(node, int):
        yield k
        return
    share, left, right = node
    before = (k * share + ONE // 2) // ONE
    yield from _count_leaves(left, before)
    yield from _count_leaves(right, k - before)


def _build_tree(weights: Sequence[float], first: int) -> BlendTree:
    if len(weights) == 1:
        return first
    middle = len(weights) // 2
    share = round(math.fsum(weights[:middle]) / math.fsum(weights) * ONE)
    return share, _build_tree(weights[:middle], first), _build_tree(weights[middle:], first + middle)


class MegatronBlend:
    """Weighted blend of data sets in Megatron's greedy order, bit-identical to Megatron's.
    It has `num_samples` samples or a few more.

    Attributes:
        sizes: number of samples to draw per data set: Megatron requests 0.5 % more than it reads.
    """

    def __init__(self, weights: Sequence[float], num_samples: int, cache: Path) -> None:
        values = np.array(weights, np.float64)
        shares = values / values.sum()
        targets = [math.ceil(num_samples * share) for share in shares.tolist()]
        self.sizes = [math.ceil(target * (1 + 0.005)) for target in targets]
        total = sum(targets)
        self.content_key = f"megatron {shares.tolist()} samples={total}"
        arrays = load_or_build_arrays(cache, f"blend {self.content_key}", lambda: build_megatron_blend(shares, total))
        self._dataset, self._sample = arrays["dataset"], arrays["sample"]

    def __len__(self) -> int:
        return int(self._dataset.size)

    def locate_sample(self, k: int) -> tuple[int, int]:
        """Return (index of the data set, number of the sample in it) of blend sample `k`; a DataError beyond the blend's size.

        Raises:
            DataError: if `k` is past the end.
        """
        if k >= len(self):
            raise DataError(
                f"data.order = megatron: the blend is fixed for {len(self)} samples, and sample {k} was read",
                hint="start the run with its final number of steps, or set data.order: stable",
            )
        return int(self._dataset[k]), int(self._sample[k])

    def count_samples(self, k: int) -> list[int]:
        """Return, for each data set, the number of its samples among the first `k` samples of the blend."""
        counts: list[int] = np.bincount(self._dataset[:k], minlength=len(self.sizes)).tolist()
        return counts


def build_megatron_blend(shares: npt.NDArray[np.float64], size: int) -> Arrays:
    """Return Megatron's blending indices for `size` samples: each sample's `dataset`, and its number in it (`sample`).
    Sample i comes from the data set d with the largest shares[d] * max(i, 1) - (samples of d so far).

    Returns:
        dataset: int16 [size]; ties go to the lowest.
        sample: int64 [size], the sample's number in its data set.

    The rule is sequential: each step depends on the counts before it. From nearly correct counts, however, it soon makes
    the choices of the correct ones. So all blocks of the sequence run in parallel from estimated counts; a block whose
    estimate differs from the end of the previous block runs again from that end, until none differs, which proves that
    the result is the sequence. Ties are as on x86-64; if a compiler fuses Megatron's multiplication and subtraction
    (64-bit ARM), Megatron's own order differs between machines.
    """
    length = 4 * math.isqrt(size) + 1
    first = np.arange(0, size, length)
    starts = _estimate_counts(shares, first)
    picks, ends = np.empty((first.size, length), np.int16), np.empty_like(starts)
    todo = np.arange(first.size)
    while todo.size:
        picks[todo], ends[todo] = _run_greedy_rule(shares, first[todo], starts[todo], length)
        todo = np.flatnonzero(np.any(ends[:-1] != starts[1:], axis=1)) + 1
        starts[todo] = ends[todo - 1]
    dataset = picks.reshape(-1)[:size]
    sample = np.empty(size, np.int64)
    counts = np.bincount(dataset, minlength=shares.size)
    sample[np.argsort(dataset, kind="stable")] = np.arange(size) - np.repeat(np.cumsum(counts) - counts, counts)
    return {"dataset": dataset, "sample": sample}


def _estimate_counts(shares: npt.NDArray[np.float64], at: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return estimated counts [len(at), D] at the samples `at`: the shares, rounded so that they sum up."""
    exact = shares * at[:, None]
    counts = np.floor(exact)
    missing = at - counts.sum(axis=1)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    return np.asarray(counts + (rank < missing[:, None]))


def _run_greedy_rule(
    shares: npt.NDArray[np.float64], first: npt.NDArray[np.int64], starts: npt.NDArray[np.float64], length: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float64]]:
    """Apply the rule to `length` samples from each of `first` with the counts `starts`.

    Returns:
        Picks [n, length] and counts [n, D].
    """
    picks, counts, rows = np.empty((length, first.size), np.int16), starts.copy(), np.arange(first.size)
    for step in range(length):
        errors = shares * np.maximum(first + step, 1)[:, None] - counts
        picks[step] = choice = errors.argmax(axis=1)
        counts[rows, choice] += 1
    return picks.T, counts
