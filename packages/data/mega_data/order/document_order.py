"""The documents of a data set in an order: where the tokens lie, without a list of all documents."""

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

    Args:
        seed: None: in the order of the file.
        unit: tokens that places are counted in; a document takes whole units.
    """

    def __init__(
        self, reader: IndexedReader, first: int, last: int, *, seed: int | None, cache: Path, unit: int = 1
    ) -> None:
        self._reader, self._first, self._last, self._unit, self._drawn = reader, first, last, unit, seed is not None
        identity = f"documents seed={seed} data={reader.fingerprint} range={first}:{last}"
        self._key = xxhash.xxh3_64_intdigest(identity.encode())
        identity += f" unit={unit}" if unit > 1 else ""
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
                sizes = -(-(ends - begins) // self._unit)
                starts = total + np.cumsum(sizes) - sizes
                parts.append(starts[::EVERY])
                total = int(starts[-1] + sizes[-1])
                bar.advance(ends.size)
        return {"starts": np.concatenate(parts)}

    def documents(self, first: int, last: int) -> Ints:
        """The numbers in the file of the documents that stand at [first, last) in the order."""
        places = np.arange(first, last)
        return self._from + (permuted_many(places, self.count, self._key) if self._drawn else places)

    def bounds(self, first: int, last: int) -> tuple[Ints, Ints]:
        """The tokens [begin, end) in the file of the documents that stand at [first, last) in the order."""
        documents, index = self.documents(first, last), self._reader.document_index
        sequences = np.clip(np.stack([index[documents], index[documents + 1]]), self._first, self._last)
        begins, ends = token_positions(self._reader, sequences)
        return begins, ends

    def find(self, at: int, count: int) -> Iterator[tuple[int, range, range]]:
        """What of which documents the units [at, at + count) of the order are; there must be as many.

        Returns:
            Of one after another: its number in the file, its tokens, and which of its units.
        """
        block = int(np.searchsorted(self._starts, at, "right")) - 1
        skip = at - int(self._starts[block])
        while count:
            span = block * EVERY, min((block + 1) * EVERY, self.count)
            begins, ends = self.bounds(*span)
            for document, *tokens in zip(self.documents(*span).tolist(), begins.tolist(), ends.tolist(), strict=True):
                units = -(-(tokens[1] - tokens[0]) // self._unit)
                own = range(units)[skip : skip + count]
                skip, count = max(0, skip - units), count - len(own)
                if own:
                    yield document, range(*tokens), own
            block += 1

    def read(self, at: int, count: int) -> Iterator[Tokens]:
        """The tokens [at, at + count) of the order, of units of one token, in parts; there must be as many."""
        for _, tokens, own in self.find(at, count):
            yield self._reader.tokens[tokens.start + own.start : tokens.start + own.stop]


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
