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
from mega_data.index_cache import Arrays, cached_arrays
from mega_data.indexed import IndexedReader
from mega_data.kinds.base import Sample, Setting
from mega_data.kinds.best_fit import best_fit
from mega_data.mask import LossWeights
from mega_data.parts import Part
from mega_data.permutation import permuted, permuted_many

GROUP = 1 << 20  # documents that are packed together: enough for a close fit


@dataclass(frozen=True)
class Pieces:
    """What a sample may hold of a data set, and how many documents were too short or too long for one.

    Attributes:
        starts: int64 [n], where each begins among the tokens.
        sizes: int64 [n], positions it takes, at most S: one less than its tokens.
    """

    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    short: int
    long: int


def pieces_of(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], seq_length: int, *, split: bool) -> Pieces:
    """Those of documents with the tokens [begins, ends); int64 [documents] each."""
    sizes = ends - begins - 1
    long = sizes > seq_length
    counts = np.where(sizes <= 0, 0, -(-sizes // seq_length) if split else ~long)
    owner = np.repeat(np.arange(sizes.size), counts)
    number = np.arange(owner.size) - (np.cumsum(counts) - counts)[owner]
    starts = begins[owner] + number * seq_length
    own = np.minimum(seq_length, ends[owner] - 1 - starts)
    return Pieces(starts, own, int((sizes <= 0).sum()), int(long.sum()))


def packing(pieces: Pieces, seq_length: int, key: int) -> Arrays:
    """Pack pieces into samples of `seq_length` positions, in groups of `GROUP` as the 64-bit `key` draws them.

    Returns:
        starts: int64 [n], sizes: int32 [n], of the pieces in the order of their samples; the small ones of a sample
            first, which shares attention about evenly among the ranks of context parallelism (`chunks_of`).
        bins: int64 [samples + 1], the first piece of each sample, and n.
    """
    order = permuted_many(np.arange(pieces.sizes.size), pieces.sizes.size, key)
    found, bounds = [], [np.zeros(1, np.int64)]
    for first in range(0, order.size, GROUP):
        group = order[first : first + GROUP]
        sizes = pieces.sizes[group]
        bins = best_fit(sizes, seq_length)
        found.append(group[np.lexsort((sizes, bins))])
        bounds.append(first + np.cumsum(np.bincount(bins)))
    order = np.concatenate(found)
    return {
        "starts": pieces.starts[order],
        "sizes": pieces.sizes[order].astype(np.int32),
        "bins": np.concatenate(bounds),
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
            f"packed seed={setting.seed} seq={self._seq_length} long={setting.config.long_documents}"
            f" data={part.reader.fingerprint} range={part.first}:{part.last}"
            + ("" if self._weights is None else f" weights={self._weights.fingerprint}")
        )

    @cached_property
    def _index(self) -> Arrays:
        return cached_arrays(self._setting.cache, self.identity, self._packed)

    def _packed(self) -> Arrays:
        reader, split = self._part.reader, self._setting.config.long_documents == "split"
        begins, ends = document_bounds(reader, self._part.first, self._part.last)
        reader.close()
        pieces = pieces_of(begins, ends, self._seq_length, split=split)
        if not pieces.sizes.size:
            raise DataError(
                f"{reader.prefix}: none of its {begins.size} documents has from 2 to seq_length + 1 = {self._seq_length + 1}"
                " tokens",
                hint="data.kind: text reads across their ends; data.long_documents: split cuts long ones",
            )
        arrays = packing(pieces, self._seq_length, xxhash.xxh3_64_intdigest(self.identity.encode()))
        samples = arrays["bins"].size - 1
        logger.info(
            "%s: %d documents in %d samples, which they fill to %.2f %%; %d longer than seq_length + 1 = %d %s, %d of fewer"
            " than two tokens left out",
            reader.prefix, begins.size, samples, 100 * pieces.sizes.sum() / (samples * self._seq_length), pieces.long,
            self._seq_length + 1, "cut into pieces" if split else "left out", pieces.short,
        )  # fmt: skip
        return arrays

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
        count = self._index["bins"].size - 1
        epoch, place = divmod(k, count)
        number = permuted(place, count, self._order(epoch))
        first, last = self._index["bins"][number : number + 2].tolist()
        starts, sizes = (self._index[name][first:last].tolist() for name in ("starts", "sizes"))
        length, used = self._seq_length, sum(sizes)
        tokens = np.full(length, self._setting.eod or 0, np.int64)
        labels, weights = tokens.copy(), np.zeros(length, np.float32)
        weights[:used] = 1.0
        at, begins = 0, []
        for start, size in zip(starts, sizes, strict=True):
            begins.append(at)
            read = self._part.reader.tokens[start : start + size + 1]
            tokens[at : at + size], labels[at : at + size] = read[:-1], read[1:]
            if self._weights is not None:
                weights[at : at + size] = self._weights[start + 1 : start + size + 1]
            at += size
        own = [*sizes, length - used]  # what is left is a document, too
        documents = np.repeat(np.arange(len(own), dtype=np.int32), own)
        return Sample(tokens, labels, weights, np.arange(length) - np.repeat([*begins, used], own), documents)


def document_bounds(
    reader: IndexedReader, first: int, last: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
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
        ConfigError: in order `megatron`, which knows no packing.
    """
    if setting.config.sample_order == "megatron":
        raise ConfigError(
            f"{part.reader.prefix}: kind {part.kind} in data.order: megatron, which has no packing",
            hint="set data.order: stable",
        )
    return PackedSamples(part, setting, weights=weights)
