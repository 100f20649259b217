"""Whole documents, several to a sample: packed by best fit, none cut, each closed to the others.

A document of n tokens takes n - 1 positions: its tokens but the last, whose labels are its tokens but the first. So no
label is another document's, and one of S + 1 tokens just fits a sample of S. What is left of a sample is padding, without
loss. A document of fewer than two tokens has nothing to predict and is left out; what is longer than S + 1 is, by
`data.long_documents`, cut into pieces that are documents of their own (a piece begins with the last label of the one
before), or left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import ConfigError, DataError
from mega_common.log import logger
from mega_data.files.indexed import IndexedReader, Tokens
from mega_data.files.mask import LossWeights
from mega_data.kinds.base import Sample, Setting
from mega_data.kinds.best_fit import best_fit
from mega_data.order.index_cache import Arrays, cached_arrays
from mega_data.order.parts import Part
from mega_data.order.permutation import permuted, permuted_many

Ints = npt.NDArray[np.int64]
GROUP = 1 << 20  # documents that are packed together: enough for a close fit


@dataclass(frozen=True)
class Pieces:
    """What a sample may hold of a data set: a document, or w sequences that go together, in each row.

    Attributes:
        starts: int64 [n, w], where each begins among the tokens.
        sizes: int64 [n, w], positions it takes, of a row at most S: one less than its tokens.
        told: what of the data set is not so in it, in words.
    """

    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    told: str


def pieces_of(reader: IndexedReader, begins: Ints, ends: Ints, seq_length: int, *, split: bool) -> Pieces:
    """Those of documents with the tokens [begins, ends); int64 [documents] each.

    Raises:
        DataError: when no document fits.
    """
    sizes = ends - begins - 1
    long = sizes > seq_length
    counts = np.where(sizes <= 0, 0, -(-sizes // seq_length) if split else ~long)
    owner = np.repeat(np.arange(sizes.size), counts)
    if not owner.size:
        raise DataError(
            f"{reader.prefix}: none of its {begins.size} documents has from 2 to seq_length + 1 = {seq_length + 1} tokens",
            hint="data.kind: text reads across their ends; data.long_documents: split cuts long ones",
        )
    number = np.arange(owner.size) - (np.cumsum(counts) - counts)[owner]
    starts = begins[owner] + number * seq_length
    own = np.minimum(seq_length, ends[owner] - 1 - starts)
    what = "cut into pieces" if split else "left out"
    told = f"{long.sum()} longer than seq_length + 1 = {seq_length + 1} {what}, {(sizes <= 0).sum()} of fewer than two tokens left out"
    return Pieces(starts[:, None], own[:, None], told)


def packing(pieces: Pieces, seq_length: int, key: int) -> Arrays:
    """Pack pieces into samples of `seq_length` positions, in groups of `GROUP` as the 64-bit `key` draws them.

    Returns:
        starts: int64 [n w], sizes: int32 [n w], of the pieces in the order of their samples; the small rows of a sample
            first, which shares attention about evenly among the ranks of context parallelism (`chunks_of`).
        bins: int64 [samples + 1], the first piece of each sample, and n w.
    """
    together = pieces.sizes.sum(1)
    order = permuted_many(np.arange(together.size), together.size, key)
    found, bounds = [], [np.zeros(1, np.int64)]
    for first in range(0, order.size, GROUP):
        group = order[first : first + GROUP]
        sizes = together[group]
        bins = best_fit(sizes, seq_length)
        found.append(group[np.lexsort((sizes, bins))])
        bounds.append(first + np.cumsum(np.bincount(bins)))
    order = np.concatenate(found)
    return {
        "starts": pieces.starts[order].ravel(),
        "sizes": pieces.sizes[order].ravel().astype(np.int32),
        "bins": np.concatenate(bounds) * pieces.sizes.shape[1],
    }


class PackedSamples:
    """Samples of whole documents of a part of a data set; which documents share one is drawn by the seed.

    An epoch is every sample once, in an order drawn for it: a pure function of (seed, content, k), without a total. The
    index is made when the first sample is read, and kept in the run's cache: 12 bytes a document and 8 a sample, read
    through a memory map.

    Args:
        weights: of each token as a label, beside the reader's tokens; None: all 1.

    Raises:
        DataError: on the first sample, when no document fits.
    """

    def __init__(self, part: Part, setting: Setting, *, weights: LossWeights | None = None) -> None:
        self._part, self._setting, self._weights = part, setting, weights
        self._seq_length = setting.config.seq_length
        self._key = (-1, 0)  # the epoch that was read last, and what draws its order

    @cached_property
    def identity(self) -> str:
        """See `Samples`."""
        part, setting = self._part, self._setting
        return (
            f"{self._rule} seed={setting.seed} seq={self._seq_length} long={setting.config.long_documents}"
            f" data={part.reader.fingerprint} range={part.first}:{part.last}"
            + ("" if self._weights is None else f" weights={self._weights.fingerprint}")
        )

    @property
    def _rule(self) -> str:
        """What tells these samples from those that are made of the same data by another rule."""
        return "packed"

    @cached_property
    def _index(self) -> Arrays:
        return cached_arrays(self._setting.cache, self.identity, self._packed)

    def _packed(self) -> Arrays:
        reader = self._part.reader
        pieces = self._pieces(reader)
        reader.close()
        arrays = packing(pieces, self._seq_length, xxhash.xxh3_64_intdigest(self.identity.encode()))
        samples = arrays["bins"].size - 1
        full = 100 * pieces.sizes.sum() / (samples * self._seq_length)
        logger.info("%s: %d samples, filled to %.2f %%; %s", reader.prefix, samples, full, pieces.told)
        return arrays

    def _pieces(self, reader: IndexedReader) -> Pieces:
        """What is packed."""
        bounds = document_bounds(reader, self._part.first, self._part.last)
        return pieces_of(reader, *bounds, self._seq_length, split=self._setting.config.long_documents == "split")

    @property
    def samples_per_epoch(self) -> float:
        """See `Samples`."""
        return self._index["bins"].size - 1

    @cached_property
    def _work(self) -> npt.NDArray[np.int64]:
        index = self._index
        return np.add.reduceat(index["sizes"].astype(np.int64) ** 2, index["bins"][:-1])

    def work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See `Samples`."""
        count = self._index["bins"].size - 1
        epochs, places = np.divmod(numbers, count)
        for epoch in np.unique(epochs).tolist():
            own = epochs == epoch
            places[own] = permuted_many(places[own], count, self._order(epoch))
        found: npt.NDArray[np.int64] = self._work[places]
        return found

    def _order(self, epoch: int) -> int:
        """The key that the order of an epoch is drawn by."""
        known, key = self._key
        if known != epoch:
            key = xxhash.xxh3_64_intdigest(f"{self.identity} epoch={epoch}".encode())
            self._key = epoch, key
        return key

    def __getitem__(self, k: int, /) -> Sample:
        starts, sizes = self._place(k)
        read = self._documents(k, starts, sizes)
        if self._weights is None:
            return self._sample(read, None)
        return self._sample(read, [self._weights_of(at, size) for at, size in zip(starts, sizes, strict=True)])

    def _weights_of(self, at: int, size: int) -> npt.NDArray[np.float32]:
        """Of the labels of a document whose tokens begin there: its tokens but the first."""
        assert self._weights is not None
        return self._weights[at + 1 : at + size + 1]

    def _place(self, k: int) -> tuple[list[int], list[int]]:
        """Where the documents of sample k begin among the tokens, and the positions that each takes."""
        count = self._index["bins"].size - 1
        epoch, place = divmod(k, count)
        number = permuted(place, count, self._order(epoch))
        first, last = self._index["bins"][number : number + 2].tolist()
        return self._index["starts"][first:last].tolist(), self._index["sizes"][first:last].tolist()

    def _documents(self, k: int, starts: list[int], sizes: list[int]) -> list[Tokens]:
        """The tokens of the documents of sample k."""
        tokens = self._part.reader.tokens
        return [tokens[start : start + size + 1] for start, size in zip(starts, sizes, strict=True)]

    def _sample(self, read: list[Tokens], weights_of: list[npt.NDArray[np.float32]] | None) -> Sample:
        """A sample of whole documents, and the weights of their tokens but the first."""
        length, sizes = self._seq_length, [document.size - 1 for document in read]
        tokens = np.full(length, self._setting.eod or 0, np.int64)
        labels, weights = tokens.copy(), np.zeros(length, np.float32)
        begins = [0]
        for document, size in zip(read, sizes, strict=True):
            own = slice(begins[-1], begins[-1] + size)
            tokens[own], labels[own] = document[:-1], document[1:]
            begins.append(own.stop)
        used = begins[-1]
        weights[:used] = 1.0 if weights_of is None else np.concatenate(weights_of)
        sizes.append(length - used)  # what is left is a document, too
        documents = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        return Sample(tokens, labels, weights, np.arange(length) - np.repeat(begins, sizes), documents)


def document_bounds(reader: IndexedReader, first: int, last: int) -> tuple[Ints, Ints]:
    """Where the tokens begin and end of the documents that begin in the sequences [first, last): int64 [documents] each."""
    bounds = reader.document_index
    documents = np.searchsorted(bounds[:-1], [first, last])
    edges = np.append(reader.pointers // reader.dtype.itemsize, reader.num_tokens)[
        bounds[documents[0] : documents[1] + 1]
    ]
    return edges[:-1], edges[1:]


def documents(part: Part, setting: Setting, _: int, *, weights: LossWeights | None = None) -> PackedSamples:
    """The kind `documents`; with the weights of their tokens, `conversations`.

    Raises:
        ConfigError: as `check_order`.
    """
    check_order(part, setting)
    return PackedSamples(part, setting, weights=weights)


def check_order(part: Part, setting: Setting) -> None:
    """Refuse order `megatron`, which knows no packing.

    Raises:
        ConfigError: as said.
    """
    if setting.config.sample_order == "megatron":
        raise ConfigError(
            f"{part.reader.prefix}: kind {part.kind} in data.order: megatron, which has no packing",
            hint="set data.order: stable",
        )
