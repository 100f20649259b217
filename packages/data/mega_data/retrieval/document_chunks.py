"""Documents in chunks of m tokens. A chunk has one number in the whole data set, independent of the samples."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from mega_data.sampling.document_order import find_token_positions
from mega_data.sampling.index_cache import Arrays, load_or_build_arrays
from mega_data.token_files.indexed_reader import CHUNK, IndexedReader

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


class DocumentChunks:
    """Division of a data set's documents into chunks of m tokens (`length`) for retrieval, numbered in file order.

    The first chunk of a document begins with it, and the last one may be short.

    Args:
        cache: folder for `starts`, 8 bytes per document, shared by the ranks; None keeps them in memory.

    Attributes:
        length: m.
    """

    def __init__(self, reader: IndexedReader, length: int, cache: Path | None = None) -> None:
        self.reader, self.length, self._cache = reader, length, cache

    def __len__(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def starts(self) -> Ints:
        """Number of the first chunk of each document, then the number of all chunks: int64 [documents + 1]."""
        if self._cache is None:
            return self._count_chunks()["starts"]
        key = f"chunks length={self.length} data={self.reader.fingerprint}"
        return load_or_build_arrays(self._cache, key, self._count_chunks)["starts"]

    def _count_chunks(self) -> Arrays:
        starts = np.zeros(self.reader.documents + 1, np.int64)
        for first in range(0, self.reader.documents, CHUNK):
            begins = find_token_positions(self.reader, self.reader.document_index[first : first + CHUNK + 1])
            np.cumsum(-(-np.diff(begins) // self.length), out=starts[first + 1 : first + begins.size])
            starts[first + 1 : first + begins.size] += starts[first]
        return {"starts": starts}

    def find_sequence_chunks(self, first: int, last: int) -> range:
        """Return the range of chunk numbers of the documents that begin in the sequences [first, last) of the data set."""
        begin, end = np.searchsorted(self.reader.document_index, [first, last])
        return range(int(self.starts[begin]), int(self.starts[end]))

    def find_documents(self, numbers: Ints) -> Ints:
        """Return the document number of each chunk number, int64 of equal shape; -1 for chunk -1."""
        return np.searchsorted(self.starts, numbers, "right") - 1

    def read_tokens(self, numbers: Ints, width: int) -> Ints:
        """Return the `width` tokens from the start of each chunk on, int64 [..., width]; -1 past the end of the
        document and for chunk -1.

        Args:
            numbers: int64 [...].

        Returns:
            int64 [..., width].
        """
        exists = numbers >= 0
        documents = self.find_documents(np.where(exists, numbers, 0))
        bounds = self.reader.document_index
        begins, ends = find_token_positions(self.reader, np.stack([bounds[documents], bounds[documents + 1]]))
        begins = begins + (numbers - self.starts[documents]) * self.length
        positions = begins[..., None] + np.arange(width)
        inside = exists[..., None] & (positions < ends[..., None])
        tokens = np.full(positions.shape, -1, np.int64)
        tokens[inside] = self.reader.tokens[positions[inside]]
        return tokens

    def compute_hashes(self, first: int, last: int) -> Hashes:
        """Return a content hash of each chunk in [first, last), uint64 [last - first]; 0 for chunks shorter than a
        quarter of the chunk length.
        """
        rows = self.read_tokens(np.arange(first, last), self.length)
        hashes = np.array([xxhash.xxh3_64_intdigest(row.data) for row in rows], np.uint64)
        return np.where((rows >= 0).sum(1) * 4 < self.length, np.uint64(0), hashes)
