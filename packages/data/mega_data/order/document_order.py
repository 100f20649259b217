"""The documents of a data set in an order drawn by a seed: where the tokens lie, without a list of all documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_common.log import ProgressBar
from mega_data.files.indexed import IndexedReader, Tokens
from mega_data.order.index_cache import Arrays, cached_arrays
from mega_data.order.permutation import permuted_many

EVERY = 16  # documents between two whose place is kept
CHUNK = 1 << 20  # documents that are looked at together, EVERY times a whole number

Ints = npt.NDArray[np.int64]


class DocumentOrder:
    """The tokens of the sequences [first, last), their documents in an order drawn by (seed, content, range).

    Of a document that these bounds cut it has the part within. See `ShuffledSamples` for what is kept and read.
    """

    def __init__(self, reader: IndexedReader, first: int, last: int, *, seed: int, cache: Path) -> None:
        self._reader, self._first, self._last = reader, first, last
        identity = f"documents seed={seed} data={reader.fingerprint} range={first}:{last}"
        self._key = xxhash.xxh3_64_intdigest(identity.encode())
        bounds = reader.document_index
        self._from = int(np.searchsorted(bounds, first, "right")) - 1
        self.count = int(np.searchsorted(bounds, last, "left")) - self._from
        self._starts = cached_arrays(cache, identity, self._index)["starts"]
        reader.close()

    def _index(self) -> Arrays:
        parts, total = [], 0
        with ProgressBar("drawing the order of documents", total=self.count, unit="documents") as bar:
            for first in range(0, self.count, CHUNK):
                begins, ends = self.bounds(first, min(first + CHUNK, self.count))
                starts = total + np.cumsum(ends - begins) - (ends - begins)
                parts.append(starts[::EVERY])
                total = int(starts[-1] + ends[-1] - begins[-1])
                bar.advance(ends.size)
        return {"starts": np.concatenate(parts)}

    def bounds(self, first: int, last: int) -> tuple[Ints, Ints]:
        """The tokens [begin, end) in the file of the documents that stand at [first, last) in the order."""
        documents = self._from + permuted_many(np.arange(first, last), self.count, self._key)
        index = self._reader.document_index
        sequences = np.clip(np.stack([index[documents], index[documents + 1]]), self._first, self._last)
        begins, ends = token_positions(self._reader, sequences)
        return begins, ends

    def read(self, at: int, count: int) -> Iterator[Tokens]:
        """The tokens [at, at + count) of the order, in parts; there must be as many."""
        block = int(np.searchsorted(self._starts, at, "right")) - 1
        skip = at - int(self._starts[block])
        while count:
            begins, ends = self.bounds(block * EVERY, min((block + 1) * EVERY, self.count))
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                own = range(begin, end)[skip : skip + count]
                skip, count = max(0, skip - (end - begin)), count - len(own)
                if own:
                    yield self._reader.tokens[own.start : own.stop]
            block += 1


def token_positions(reader: IndexedReader, sequences: Ints) -> Ints:
    """Where sequences begin, in tokens; the number after the last one stands for the end of all."""
    inside = sequences < len(reader)
    begins = reader.pointers[np.where(inside, sequences, 0)] // reader.dtype.itemsize
    return np.where(inside, begins, reader.num_tokens)


def token_range(reader: IndexedReader, first: int, last: int) -> tuple[int, int]:
    """Where the tokens of the sequences [first, last) begin and end, in tokens.

    Raises:
        DataError: when there are none.
    """
    bounds = reader.position(first), reader.position(last)
    if bounds[0] >= bounds[1]:
        raise DataError(f"{reader.prefix}: no token in its sequences {first} to {last} (it has {len(reader)})")
    return bounds
