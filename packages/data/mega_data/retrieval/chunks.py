"""Documents in chunks of m tokens. A chunk has one number throughout a data set, whatever samples are made of it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from mega_data.files.indexed import CHUNK, IndexedReader
from mega_data.order.document_order import token_positions
from mega_data.order.index_cache import Arrays, cached_arrays

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


class Chunks:
    """The chunks of a data set, in the order of the file: each begins m tokens after the one before, the first with its
    document, the last of which may be short.

    Args:
        cache: a folder for `starts`, 8 bytes a document, which ranks then share; None: they are kept in memory.

    Attributes:
        length: m.
    """

    def __init__(self, reader: IndexedReader, length: int, cache: Path | None = None) -> None:
        self.reader, self.length, self._cache = reader, length, cache

    def __len__(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def starts(self) -> Ints:
        """int64 [documents + 1], the first chunk of each document, then their number."""
        if self._cache is None:
            return self._counted()["starts"]
        key = f"chunks length={self.length} data={self.reader.fingerprint}"
        return cached_arrays(self._cache, key, self._counted)["starts"]

    def _counted(self) -> Arrays:
        starts = np.zeros(self.reader.documents + 1, np.int64)
        for first in range(0, self.reader.documents, CHUNK):
            begins = token_positions(self.reader, self.reader.document_index[first : first + CHUNK + 1])
            np.cumsum(-(-np.diff(begins) // self.length), out=starts[first + 1 : first + begins.size])
            starts[first + 1 : first + begins.size] += starts[first]
        return {"starts": starts}

    def of_sequences(self, first: int, last: int) -> range:
        """The chunks of the documents that begin in the sequences [first, last)."""
        begin, end = np.searchsorted(self.reader.document_index, [first, last])
        return range(int(self.starts[begin]), int(self.starts[end]))

    def documents(self, numbers: Ints) -> Ints:
        """The document of each of some chunks, int64 of their shape; -1 of the chunk -1."""
        return np.searchsorted(self.starts, numbers, "right") - 1

    def tokens(self, numbers: Ints, width: int) -> Ints:
        """So many tokens from the begin of each of some chunks on, -1 past the end of its document and for the chunk -1.

        Args:
            numbers: int64 [...].

        Returns:
            int64 [..., width].
        """
        there = numbers >= 0
        documents = self.documents(np.where(there, numbers, 0))
        bounds = self.reader.document_index
        begins, ends = token_positions(self.reader, np.stack([bounds[documents], bounds[documents + 1]]))
        begins = begins + (numbers - self.starts[documents]) * self.length
        places = begins[..., None] + np.arange(width)
        inside = there[..., None] & (places < ends[..., None])
        found = np.full(places.shape, -1, np.int64)
        found[inside] = self.reader.tokens[places[inside]]
        return found

    def hashes(self, first: int, last: int) -> Hashes:
        """Of the content of the chunks [first, last), uint64 [last - first]; 0 of those of fewer than m / 4 tokens."""
        rows = self.tokens(np.arange(first, last), self.length)
        found = np.array([xxhash.xxh3_64_intdigest(row.data) for row in rows], np.uint64)
        return np.where((rows >= 0).sum(1) * 4 < self.length, np.uint64(0), found)
