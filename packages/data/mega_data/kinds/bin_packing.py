"""Best-fit decreasing bin packing, with work that grows with the range of lengths instead of the number of items."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def pack_best_fit(sizes: npt.NDArray[np.integer[Any]], capacity: int) -> Ints:
    """Assign each item, the largest first, to the bin with the least free space that fits it: bin numbers, int64 [n].

    Items of one size are assigned together: the bin with the least space remains the best fit while it takes another
    one, so it is filled with as many as fit. Ties between bins go to the one opened or filled last, between items to
    the first.

    Args:
        sizes: int [n], each from 1 to `capacity`.
        capacity: capacity of a bin.

    Returns:
        Bin of each item, int64 [n], numbered from 0.
    """
    order = np.argsort(-sizes.astype(np.int64), kind="stable")
    ordered = sizes[order].astype(np.int64)
    edges = [*np.flatnonzero(np.diff(ordered, prepend=-1)).tolist(), order.size]
    assigned, bins = np.empty(order.size, np.int64), _BinsBySpace(capacity)
    for first, last in pairwise(edges):
        assigned[order[first:last]] = bins.add_items(int(ordered[first]), last - first)
    return assigned


class _BinsBySpace:
    """Bins grouped by free space."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._count = capacity, 0
        self._by_space: dict[int, Ints] = {}
        self._spaces = 0  # bit s is set if a bin has free space s

    def add_items(self, size: int, count: int) -> Ints:
        """Return the bins of `count` items of one size, int64 [count]."""
        parts = []
        while count:
            fitting = self._spaces >> size
            space = size + (fitting & -fitting).bit_length() - 1 if fitting else self._capacity
            per_bin = space // size
            bins = self._take_bins(space, -(-count // per_bin)) if fitting else self._open_bins(-(-count // per_bin))
            added = min(count, bins.size * per_bin)
            parts.append(np.repeat(bins, per_bin)[:added])
            full = added // per_bin
            self._return_bins(space - per_bin * size, bins[:full])
            self._return_bins(space - added % per_bin * size, bins[full:])
            count -= added
        return np.concatenate(parts)

    def _open_bins(self, count: int) -> Ints:
        self._count += count
        return np.arange(self._count - count, self._count)

    def _take_bins(self, space: int, count: int) -> Ints:
        bins = self._by_space.pop(space)
        rest, taken = bins[: max(0, bins.size - count)], bins[max(0, bins.size - count) :]
        self._spaces ^= 1 << space
        self._return_bins(space, rest)
        return taken

    def _return_bins(self, space: int, bins: Ints) -> None:
        if space and bins.size:
            others = self._by_space.get(space)
            self._by_space[space] = bins if others is None else np.concatenate([others, bins])
            self._spaces |= 1 << space
