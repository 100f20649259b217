"""Words of a text and hashes of runs of words, shared by the rules on repetition, similarity and overlap."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

Hashes = npt.NDArray[np.uint64]

# Thai, Lao, Burmese, Khmer, kana and Chinese characters: scripts without spaces, where each character is a word.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that the multiplication is invertible


class AnalyzedText:
    """Text of a document with its words and their hashes, computed on demand.

    Attributes:
        language: ISO 639-1 code, once a rule has found it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.language: str | None = None

    @cached_property
    def words(self) -> list[str]:
        """Words of the text in order, in lower case and without punctuation."""
        return WORD.findall(self.text.lower())

    @cached_property
    def word_hashes(self) -> Hashes:
        """64-bit hash of each word, uint64 [words], equal in every process."""
        return np.fromiter(map(xxhash.xxh3_64_intdigest, map(str.encode, self.words)), np.uint64, len(self.words))

    @cached_property
    def word_lengths(self) -> npt.NDArray[np.int64]:
        """Number of characters of each word, int64 [words]."""
        return np.fromiter(map(len, self.words), np.int64, count=len(self.words))

    def hash_word_ngrams(self, n: int) -> Hashes:
        """Return a 64-bit hash of each run of `n` words, [max(0, words - n + 1)]."""
        return hash_ngrams(self.word_hashes, n)


def hash_ngrams(hashes: Hashes, n: int) -> Hashes:
    """Return a 64-bit hash of each run of `n` consecutive items, given the item `hashes`.
    The result has shape [max(0, len(hashes) - n + 1)].
    """
    count = max(0, len(hashes) - n + 1)
    result = np.zeros(count, np.uint64)
    for k in range(n):
        result = result * FACTOR + hashes[k : k + count]
    return result


def hash_numbers(numbers: npt.NDArray[Any]) -> Hashes:
    """Return a 64-bit hash of each number (the finalizer of SplitMix64), with independent hashes for adjacent numbers."""
    x = numbers.astype(np.uint64) + FACTOR
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Hashes = x ^ (x >> np.uint64(31))
    return result
