"""Filter for neighbors that would leak a model's own labels: chunks of one document, and of copies of it.

What a model is given with chunk u it may carry on to all tokens behind; so a neighbour must not hold what the document goes on
with. Left out are neighbours

- of the same document;
- that hold a chunk, in either half, that the document has too, token for token: copies that begin alike. What is shorter
  than m / 4 tokens, such as the token that ends a document, tells nothing;
- that hold, from whichever token on, w = m / 4 tokens of the document, the last of which are of the next chunk, as they end
  at a multiple of w or at that chunk's end: copies that are shifted, of what comes next. (Any 2w - 1 tokens of it hold such w.)

A copy that is shifted, and shares no w tokens with the next chunk, is a neighbour like any other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mega_data.retrieval.document_chunks import DocumentChunks, Hashes, Ints

Bools = npt.NDArray[np.bool_]
AT_ONCE = 1 << 13  # pairs
BASE = 0x9E3779B97F4A7C15  # odd: of the polynomial that stands for some tokens in a row
BLOCK = 1 << 16  # chunks


class LabelLeakFilter:
    """Filter of the database chunks that a data chunk may have as neighbors.

    Kept in memory: 16 bytes a chunk.

    Args:
        data, database: one, where chunks are searched among themselves.
    """

    def __init__(self, data: DocumentChunks, database: DocumentChunks) -> None:
        self._data, self._database, self._same = data, database, data is database
        self._hashes = _hash_all_chunks(database)
        own = self._hashes if self._same else _hash_all_chunks(data)
        documents = np.repeat(np.arange(data.reader.documents), np.diff(data.starts))
        self._keys = np.sort(_document_content_keys(documents, own)[own > 0])

    def select_allowed(self, numbers: Ints, candidates: Ints) -> Bools:
        """Return which of the candidates, int64 [n, c] with -1 for none, may be neighbors of the chunks, int64 [n]:
        bool [n, c].
        """
        documents = self._data.find_documents(numbers)
        good: Bools = candidates >= 0
        if self._same:
            good[self._database.find_documents(candidates) == documents[:, None]] = False
        rows, columns = np.nonzero(good)
        for start in range(0, rows.size, AT_ONCE):
            at = rows[start : start + AT_ONCE], columns[start : start + AT_ONCE]
            found = candidates[at]
            good[at] = ~(self._shares_chunk(documents[at[0]], found) | self._holds_continuation(numbers[at[0]], found))
        return good

    def _shares_chunk(self, documents: Ints, found: Ints) -> Bools:
        """Return whether the documents, int64 [n], contain one of the two chunks of the neighbors `found`, int64 [n]."""
        after = np.minimum(found + 1, len(self._database) - 1)
        after = np.where(self._database.find_documents(after) == self._database.find_documents(found), after, found)
        wanted = _document_content_keys(documents, self._hashes[np.stack([found, after])])
        first, second = np.searchsorted(self._keys, wanted) < np.searchsorted(self._keys, wanted, "right")
        return np.asarray(first | second)

    def _holds_continuation(self, numbers: Ints, found: Ints) -> Bools:
        """Return whether the neighbors `found` contain the continuation of the chunks `numbers`; int64 [n] each."""
        width = 2 * self._data.length
        return contains_continuation(self._data.read_tokens(numbers, width), self._database.read_tokens(found, width))


def contains_continuation(own: Ints, theirs: Ints) -> Bools:
    """Return whether tokens contain a stretch of the continuation of a chunk.

    Args:
        own: int64 [n, 2m], a chunk and what comes after it, -1 past the document's end.
        theirs: int64 [n, 2m], the same of other chunks.

    Returns:
        bool [n]; true too, once in 2^50 or so, for stretches that are others.
    """
    length = own.shape[1] // 2
    width = max(1, length // 4)
    stretches, windows = _rolling_hashes(own, width), _rolling_hashes(theirs, width)
    left = (own[:, length:] >= 0).sum(1)
    told = np.zeros(len(own), np.bool_)
    for end in range(width, length + width, width):
        ends = length + np.minimum(end, left)
        stretch = np.take_along_axis(stretches, (ends - width)[:, None], 1)
        told |= (left > 0) & (windows == stretch).any(1)
    return told


def _rolling_hashes(tokens: Ints, width: int) -> Hashes:
    """Return a hash of each run of `width` tokens, uint64 [n, 2m - width + 1]."""
    powers = np.array([pow(BASE, place, 1 << 64) for place in range(width)], np.uint64)
    rows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), width, 1)
    return np.asarray(rows @ powers, np.uint64)


def _document_content_keys(documents: Ints, hashes: Hashes) -> Hashes:
    """Return a hash of each pair of a document and a content."""
    return np.asarray(hashes ^ ((documents.astype(np.uint64) + np.uint64(1)) * np.uint64(BASE)), np.uint64)


def _hash_all_chunks(chunks: DocumentChunks) -> Hashes:
    found = np.empty(len(chunks), np.uint64)
    for first in range(0, found.size, BLOCK):
        found[first : first + BLOCK] = chunks.compute_hashes(first, min(first + BLOCK, found.size))
    return found
