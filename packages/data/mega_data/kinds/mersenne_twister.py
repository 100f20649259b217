"""64-bit Mersenne Twister, which numpy lacks, and the shuffle of Megatron's masked-word data sets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

SIZE, LAG = 312, 156
UPPER, LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
MATRIX = np.uint64(0xB5026F5AA96619E9)
ONE = np.uint64(1)
BLOCK = 256 * LAG  # numbers generated at a time

Words = npt.NDArray[np.uint64]


def mt19937_64(seed: int) -> Iterator[Words]:
    """Yield the numbers of C++'s `std::mt19937_64(seed)` (Nishimura, 2000) in blocks, uint64 [BLOCK] each."""
    state = np.empty(SIZE + BLOCK, np.uint64)
    word = seed & 0xFFFFFFFFFFFFFFFF
    for i in range(SIZE):
        state[i] = word
        word = (6364136223846793005 * (word ^ word >> 62) + i + 1) & 0xFFFFFFFFFFFFFFFF
    while True:
        for at in range(0, BLOCK, LAG):  # a number depends on the one LAG before it, so LAG are computed at once
            old = state[at : at + LAG] & UPPER | state[at + 1 : at + LAG + 1] & LOWER
            state[at + SIZE : at + SIZE + LAG] = state[at + LAG : at + SIZE] ^ old >> ONE ^ (old & ONE) * MATRIX
        yield _temper(state[SIZE:])
        state[:SIZE] = state[BLOCK:]


def _temper(x: Words) -> Words:
    x = x ^ x >> np.uint64(29) & np.uint64(0x5555555555555555)
    x = x ^ x << np.uint64(17) & np.uint64(0x71D67FFFEDA60000)
    x = x ^ x << np.uint64(37) & np.uint64(0xFFF7EEE000000000)
    return x ^ x >> np.uint64(43)


def mt19937_permutation(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return a permutation of range(count), by a Fisher-Yates shuffle from the last position down."""
    order = np.arange(count)
    view = order.data
    last = count - 1
    for block in mt19937_64(seed):
        positions = np.arange(last, max(last - BLOCK, 0), -1)
        drawn = block[: positions.size] % (positions + 1).astype(np.uint64)
        for i, j in zip(positions.tolist(), drawn.tolist(), strict=True):
            view[i], view[j] = view[j], view[i]
        last -= BLOCK
        if last <= 0:
            break
    return order
