"""Best-fit decreasing bin packing, for as many items as there are documents: its work grows with the lengths, not the items."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def best_fit(sizes: npt.NDArray[np.integer[Any]], capacity: int) -> Ints:
    """Put each item into the bin with the least room that still takes it, the largest items first.

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
    found, bins = np.empty(order.size, np.int64), _Bins(capacity)
    for first, last in pairwise(edges):
        found[order[first:last]] = bins.put(int(ordered[first]), last - first)
    return found


class _Bins:
    """Bins by the room that is left in them."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._count = capacity, 0
        self._by_room: dict[int, Ints] = {}
        self._rooms = 0  # bit r is set where bins have room r

    def put(self, size: int, count: int) -> Ints:
        """The bins that so many items of one size go to, int64 [count]."""
        parts = []
        while count:
            wide = self._rooms >> size
            room = size + (wide & -wide).bit_length() - 1 if wide else self._capacity
            each = room // size  # items that such a bin takes
            taken = self._take(room, -(-count // each)) if wide else self._opened(-(-count // each))
            put = min(count, taken.size * each)
            parts.append(np.repeat(taken, each)[:put])
            full = put // each
            self._keep(room - each * size, taken[:full])
            self._keep(room - put % each * size, taken[full:])
            count -= put
        return np.concatenate(parts)

    def _opened(self, count: int) -> Ints:
        self._count += count
        return np.arange(self._count - count, self._count)

    def _take(self, room: int, count: int) -> Ints:
        held = self._by_room.pop(room)
        rest, taken = held[: max(0, held.size - count)], held[max(0, held.size - count) :]
        self._rooms ^= 1 << room
        self._keep(room, rest)
        return taken

    def _keep(self, room: int, bins: Ints) -> None:
        if room and bins.size:
            held = self._by_room.get(room)
            self._by_room[room] = bins if held is None else np.concatenate([held, bins])
            self._rooms |= 1 << room
