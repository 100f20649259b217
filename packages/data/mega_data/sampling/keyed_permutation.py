"""Permutations drawn by a key, evaluated at any position without building them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
ROUNDS = 6


def permute_index(i: int, n: int, key: int) -> int:
    """Return the image of `i` under a pseudorandom permutation of range(n) drawn by the 64-bit `key`, without storing
    the permutation.

    A Feistel network permutes the smallest power of four that is at least n; a value of n or more is permuted again
    (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), less than four times on average.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = i >> half, i & low
        for step in range(ROUNDS):
            left, right = right, left ^ (splitmix64(splitmix64(key + step) + right) >> (64 - half))
        i = left << half | right
        if i < n:
            return i


def permute_indices(positions: npt.NDArray[np.int64], n: int, key: int) -> npt.NDArray[np.int64]:
    """Return the images of many positions under the permutation of range(n) of `permute_index`, int64 [len(positions)]."""
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    low, width, keep = np.uint64((1 << half) - 1), np.uint64(half), np.uint64(64 - half)
    keys = [np.uint64(splitmix64(key + step)) for step in range(ROUNDS)]
    out = positions.astype(np.uint64)
    todo = np.arange(out.size)
    while todo.size:
        now = out[todo]
        left, right = now >> width, now & low
        for key_of_round in keys:
            left, right = right, left ^ (_splitmix64_many(right + key_of_round) >> keep)
        out[todo] = now = left << width | right
        todo = todo[now >= n]
    return out.astype(np.int64)


def splitmix64(x: int) -> int:
    """Return the splitmix64 hash of the 64-bit state `x` (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def _splitmix64_many(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
