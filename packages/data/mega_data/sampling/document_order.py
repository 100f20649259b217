"""Order of the documents of a data set, with token positions, drawn by a key without a list of all documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar
from mega_data.sampling.index_cache import Arrays, load_or_build_arrays
from mega_data.token_files.indexed_reader import IndexedReader, Tokens

MASK = (1 << 64) - 1
ROUNDS = 6


def permute_index(i: int, n: int, key: int) -> int:
    """Return the image of `i` under a pseudorandom permutation of range(n), without storing it.
    The permutation is drawn by the 64-bit `key`.

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


STRIDE = 16  # the start of every 16th document is stored
CHUNK = 1 << 20  # documents that are processed at a time, a multiple of STRIDE

Ints = npt.NDArray[np.int64]


class DocumentOrder:
    """Order of the documents in the sequences [first, last) of a data set, and the tokens in that order.
    The order is drawn by seed, content and range.

    A document that these bounds cut contributes the part within. See `ShuffledTokenWindows` for memory and reads.

    Args:
        seed: seed of the order; None for the order of the file.
        unit: number of tokens in which positions are counted; a document takes whole units.
    """

    def __init__(
        self, reader: IndexedReader, first: int, last: int, *, seed: int | None, cache: Path, unit: int = 1
    ) -> None:
        self._reader, self._first, self._last, self._unit, self._drawn = reader, first, last, unit, seed is not None
        content_key = f"documents seed={seed} data={reader.fingerprint} range={first}:{last}"
        self._key = xxhash.xxh3_64_intdigest(content_key.encode())
        content_key += f" unit={unit}" if unit > 1 else ""
        bounds = reader.document_index
        self._from = int(np.searchsorted(bounds, first, "right")) - 1
        self.count = int(np.searchsorted(bounds, last, "left")) - self._from
        self._starts = load_or_build_arrays(cache, content_key, self._build_index)["starts"]
        reader.close()

    def _build_index(self) -> Arrays:
        parts, total = [], 0
        with ProgressBar("ordering documents", total=self.count, unit="documents") as bar:
            for first in range(0, self.count, CHUNK):
                begins, ends = self.find_token_bounds(first, min(first + CHUNK, self.count))
                sizes = -(-(ends - begins) // self._unit)
                starts = total + np.cumsum(sizes) - sizes
                parts.append(starts[::STRIDE])
                total = int(starts[-1] + sizes[-1])
                bar.advance(ends.size)
        return {"starts": np.concatenate(parts)}

    def list_document_numbers(self, first: int, last: int) -> Ints:
        """Return the document numbers in the file at the positions [first, last) of the order, int64 [last - first]."""
        positions = np.arange(first, last)
        return self._from + (permute_indices(positions, self.count, self._key) if self._drawn else positions)

    def find_token_bounds(self, first: int, last: int) -> tuple[Ints, Ints]:
        """Return the token positions in the file (begins, ends) of documents in the drawn order.
        The documents are at the positions [first, last) of the order; the results are int64 [last - first] each.
        """
        documents, index = self.list_document_numbers(first, last), self._reader.document_index
        sequences = np.clip(np.stack([index[documents], index[documents + 1]]), self._first, self._last)
        begins, ends = find_token_positions(self._reader, sequences)
        return begins, ends

    def find_documents(self, start: int, count: int) -> Iterator[tuple[int, range, range]]:
        """Yield (number, token range in the file, range of units) of each document that has the units [start, start + count).

        The range is the tokens, or multiples of `unit` tokens, [start, start + count) of the order, which must exist.

        Yields:
            For each document in order: its number in the file, its token range, and the range of its units.
        """
        block = int(np.searchsorted(self._starts, start, "right")) - 1
        skip = start - int(self._starts[block])
        while count:
            span = block * STRIDE, min((block + 1) * STRIDE, self.count)
            begins, ends = self.find_token_bounds(*span)
            for document, *tokens in zip(
                self.list_document_numbers(*span).tolist(), begins.tolist(), ends.tolist(), strict=True
            ):
                units = -(-(tokens[1] - tokens[0]) // self._unit)
                own = range(units)[skip : skip + count]
                skip, count = max(0, skip - units), count - len(own)
                if own:
                    yield document, range(*tokens), own
            block += 1

    def read_tokens(self, start: int, count: int) -> Iterator[Tokens]:
        """Yield the tokens [start, start + count) in the order of the documents, one array per document.
        This requires `unit` 1, and all of the tokens must exist.
        """
        for _, tokens, own in self.find_documents(start, count):
            yield self._reader.tokens[tokens.start + own.start : tokens.start + own.stop]


def find_token_positions(reader: IndexedReader, sequences: Ints) -> Ints:
    """Return the position in the data set of each sequence's first token.
    For the number after the last sequence it is the number of tokens.
    """
    inside = sequences < len(reader)
    begins = reader.pointers[np.where(inside, sequences, 0)] // reader.dtype.itemsize
    return np.where(inside, begins, reader.num_tokens)


def find_token_range(reader: IndexedReader, first: int, last: int) -> tuple[int, int]:
    """Return the token positions (begin, end) of the sequences [first, last), end excluded; a DataError for no tokens.

    Raises:
        DataError: if they have no tokens.
    """
    bounds = reader.find_token_position(first), reader.find_token_position(last)
    if bounds[0] >= bounds[1]:
        raise DataError(f"{reader.prefix}: has no token in its sequences {first} to {last} of {len(reader)}")
    return bounds
