"""Best-fit decreasing bin packing, with work that grows with the range of lengths instead of the number of items."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def pack_best_fit(sizes: npt.NDArray[np.integer[Any]], capacity: int) -> Ints:
    """Assign each item to the bin with the least room that fits it, the largest items first.

    Items of one size go all at once: the bin with the least room stays the one with the least while another fits, so it
    takes as many as it has room for. Ties between bins go to the one opened or filled last, between items to the first.

    Args:
        sizes: int [n], each from 1 to `capacity`.
        capacity: of a bin.

    Returns:
        The bin of each item, int64 [n], numbered from 0.
    """
    order = np.argsort(-sizes.astype(np.int64), kind="stable")
    ordered = sizes[order].astype(np.int64)
    edges = [*np.flatnonzero(np.diff(ordered, prepend=-1)).tolist(), order.size]
    found, bins = np.empty(order.size, np.int64), _BinsByRoom(capacity)
    for first, last in pairwise(edges):
        found[order[first:last]] = bins.add_items(int(ordered[first]), last - first)
    return found


class _BinsByRoom:
    """Bins grouped by remaining room."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._count = capacity, 0
        self._by_room: dict[int, Ints] = {}
        self._rooms = 0  # bit r is set where bins have room r

    def add_items(self, size: int, count: int) -> Ints:
        """Return the bins that `count` items of one size go to, int64 [count]."""
        parts = []
        while count:
            wide = self._rooms >> size
            room = size + (wide & -wide).bit_length() - 1 if wide else self._capacity
            each = room // size  # items that such a bin takes
            taken = self._take_bins(room, -(-count // each)) if wide else self._open_bins(-(-count // each))
            put = min(count, taken.size * each)
            parts.append(np.repeat(taken, each)[:put])
            full = put // each
            self._return_bins(room - each * size, taken[:full])
            self._return_bins(room - put % each * size, taken[full:])
            count -= put
        return np.concatenate(parts)

    def _open_bins(self, count: int) -> Ints:
        self._count += count
        return np.arange(self._count - count, self._count)

    def _take_bins(self, room: int, count: int) -> Ints:
        held = self._by_room.pop(room)
        rest, taken = held[: max(0, held.size - count)], held[max(0, held.size - count) :]
        self._rooms ^= 1 << room
        self._return_bins(room, rest)
        return taken

    def _return_bins(self, room: int, bins: Ints) -> None:
        if room and bins.size:
            held = self._by_room.get(room)
            self._by_room[room] = bins if held is None else np.concatenate([held, bins])
            self._rooms |= 1 << room
