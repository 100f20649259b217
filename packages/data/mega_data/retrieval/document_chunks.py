"""Chunks of documents for retrieval, and the filter for neighbors that would leak labels.

Documents are divided into chunks of m tokens. A chunk has one number in the whole data set, independent of the samples.

The neighbors of chunk u affect all later tokens of the sample, so a neighbor must not contain the continuation of the
document. These neighbors are rejected:

- chunks of the same document;
- neighbors with a chunk, in either half, that also occurs in the document, token for token (an aligned copy). Chunks of
  fewer than m / 4 tokens, such as a single end-of-document token, are not compared;
- neighbors that contain, at any position, w = m / 4 consecutive tokens of the document that end in the next chunk, at a
  multiple of w or at the end of that chunk (a shifted copy of the continuation). Any 2w - 1 tokens of the next chunk
  contain w such tokens.

A shifted copy that shares no w tokens with the next chunk is accepted.
"""

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
        """Return the `width` tokens from the start of each chunk on, int64 [..., width], -1 past the document's end.

        They are -1 for chunk -1 as well.

        Args:
            numbers: int64 [...].
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
        """Return a content hash of each chunk in [first, last), uint64 [last - first]; 0 for one less than a quarter full."""
        rows = self.read_tokens(np.arange(first, last), self.length)
        hashes = np.array([xxhash.xxh3_64_intdigest(row.data) for row in rows], np.uint64)
        return np.where((rows >= 0).sum(1) * 4 < self.length, np.uint64(0), hashes)


Bools = npt.NDArray[np.bool_]
PAIRS = 1 << 13  # pairs that are compared at a time
BASE = 0x9E3779B97F4A7C15  # odd base of the rolling hash
BLOCK = 1 << 16  # chunks that are hashed at a time


class NeighborLeakFilter:
    """Filter of retrieval candidates that would leak labels.
    It rejects chunks from the queried chunk's own document, copies of that document's chunks, and copies of the chunk's
    continuation.

    Memory: 16 bytes per chunk.

    Args:
        data, database: the same object if a data set is searched for its own neighbors.
    """

    def __init__(self, data: DocumentChunks, database: DocumentChunks) -> None:
        self._data, self._database, self._same = data, database, data is database
        self._hashes = _hash_all_chunks(database)
        hashes = self._hashes if self._same else _hash_all_chunks(data)
        documents = np.repeat(np.arange(data.reader.documents), np.diff(data.starts))
        self._keys = np.sort(_document_content_keys(documents, hashes)[hashes > 0])

    def mask_allowed_candidates(self, numbers: Ints, candidates: Ints) -> Bools:
        """Return a mask [n, c] of the retrieval candidates that may be neighbors of chunks without leaking labels.
        The candidates are in the database, the chunks are the data chunks `numbers`.

        Args:
            numbers: chunks, int64 [n].
            candidates: chunks of the database, int64 [n, c], -1 for none.
        """
        documents = self._data.find_documents(numbers)
        allowed: Bools = candidates >= 0
        if self._same:
            allowed[self._database.find_documents(candidates) == documents[:, None]] = False
        rows, columns = np.nonzero(allowed)
        for start in range(0, rows.size, PAIRS):
            at = rows[start : start + PAIRS], columns[start : start + PAIRS]
            neighbors = candidates[at]
            leaks = self._shares_chunk(documents[at[0]], neighbors)
            allowed[at] = ~(leaks | self._has_continuation(numbers[at[0]], neighbors))
        return allowed

    def _shares_chunk(self, documents: Ints, neighbors: Ints) -> Bools:
        """Return whether the documents, int64 [n], contain one of the two chunks of the neighbors, int64 [n]."""
        after = np.minimum(neighbors + 1, len(self._database) - 1)
        same_document = self._database.find_documents(after) == self._database.find_documents(neighbors)
        after = np.where(same_document, after, neighbors)
        keys = _document_content_keys(documents, self._hashes[np.stack([neighbors, after])])
        first, second = np.searchsorted(self._keys, keys) < np.searchsorted(self._keys, keys, "right")
        return np.asarray(first | second)

    def _has_continuation(self, numbers: Ints, neighbors: Ints) -> Bools:
        """Return whether the neighbors contain the continuation of the chunks `numbers`; int64 [n] each."""
        width = 2 * self._data.length
        tokens = self._data.read_tokens(numbers, width)
        return mark_leaking_neighbors(tokens, self._database.read_tokens(neighbors, width))


def mark_leaking_neighbors(chunks: Ints, neighbors: Ints) -> Bools:
    """Return for each row whether a neighbor contains a part of the chunk's continuation, bool [n].
    The tokens `neighbors` are searched for a part of the second half (the continuation) of the tokens `chunks`.

    Args:
        chunks: int64 [n, 2m], the tokens of a chunk and of its continuation, -1 past the end of the document.
        neighbors: int64 [n, 2m], the tokens of a neighbor, likewise.

    Returns:
        bool [n], with false positives at a rate of about 2^-50.
    """
    length = chunks.shape[1] // 2
    width = max(1, length // 4)
    own_hashes, neighbor_hashes = _rolling_hashes(chunks, width), _rolling_hashes(neighbors, width)
    left = (chunks[:, length:] >= 0).sum(1)
    leaks = np.zeros(len(chunks), np.bool_)
    for end in range(width, length + width, width):
        ends = length + np.minimum(end, left)
        hashes = np.take_along_axis(own_hashes, (ends - width)[:, None], 1)
        leaks |= (left > 0) & (neighbor_hashes == hashes).any(1)
    return leaks


def _rolling_hashes(tokens: Ints, width: int) -> Hashes:
    """Return a hash of each run of `width` tokens, uint64 [n, 2m - width + 1]."""
    powers = np.array([pow(BASE, exponent, 1 << 64) for exponent in range(width)], np.uint64)
    rows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), width, 1)
    return np.asarray(rows @ powers, np.uint64)


def _document_content_keys(documents: Ints, hashes: Hashes) -> Hashes:
    """Return a hash of each pair of a document and a content."""
    return np.asarray(hashes ^ ((documents.astype(np.uint64) + np.uint64(1)) * np.uint64(BASE)), np.uint64)


def _hash_all_chunks(chunks: DocumentChunks) -> Hashes:
    hashes = np.empty(len(chunks), np.uint64)
    for first in range(0, hashes.size, BLOCK):
        hashes[first : first + BLOCK] = chunks.compute_hashes(first, min(first + BLOCK, hashes.size))
    return hashes
