"""Samples of whole documents, packed by best-fit decreasing bin packing.

The work of the packing grows with the range of lengths, not with the number of documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import ConfigError, DataError
from mega_common.progress_logging import logger
from mega_data.kinds.dataset_kind import DatasetContext, TrainingSample
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.sampling.document_order import permute_index, permute_indices
from mega_data.sampling.index_cache import Arrays, load_or_build_arrays
from mega_data.token_files.indexed_reader import IndexedReader, Tokens
from mega_data.token_files.loss_mask import LossWeights

Ints = npt.NDArray[np.int64]


def assign_bins_best_fit(sizes: npt.NDArray[np.integer[Any]], capacity: int) -> Ints:
    """Assign each item, the largest first, to the bin with the least free space that fits it: bin numbers, int64 [n].

    Items of one size are assigned together: the bin with the least space remains the best fit while it takes another
    one, so it is filled with as many as fit. Ties between bins go to the one opened or filled last, between items to
    the first.

    Args:
        sizes: int [n], each from 1 to `capacity`.
        capacity: capacity of a bin.

    Returns:
        Bin of each item, int64 [n], numbered from 0.
    """
    order = np.argsort(-sizes.astype(np.int64), kind="stable")
    ordered = sizes[order].astype(np.int64)
    edges = [*np.flatnonzero(np.diff(ordered, prepend=-1)).tolist(), order.size]
    assigned, bins = np.empty(order.size, np.int64), _BinsBySpace(capacity)
    for first, last in pairwise(edges):
        assigned[order[first:last]] = bins.add_items(int(ordered[first]), last - first)
    return assigned


class _BinsBySpace:
    """Bins grouped by free space."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._count = capacity, 0
        self._by_space: dict[int, Ints] = {}
        self._spaces = 0  # bit s is set if a bin has free space s

    def add_items(self, size: int, count: int) -> Ints:
        """Return the bin numbers of `count` items of one size, int64 [count]."""
        parts = []
        while count:
            fitting = self._spaces >> size
            space = size + (fitting & -fitting).bit_length() - 1 if fitting else self._capacity
            per_bin = space // size
            bins = self._take_bins(space, -(-count // per_bin)) if fitting else self._open_bins(-(-count // per_bin))
            added = min(count, bins.size * per_bin)
            parts.append(np.repeat(bins, per_bin)[:added])
            full = added // per_bin
            self._return_bins(space - per_bin * size, bins[:full])
            self._return_bins(space - added % per_bin * size, bins[full:])
            count -= added
        return np.concatenate(parts)

    def _open_bins(self, count: int) -> Ints:
        self._count += count
        return np.arange(self._count - count, self._count)

    def _take_bins(self, space: int, count: int) -> Ints:
        bins = self._by_space.pop(space)
        rest, taken = bins[: max(0, bins.size - count)], bins[max(0, bins.size - count) :]
        self._spaces ^= 1 << space
        self._return_bins(space, rest)
        return taken

    def _return_bins(self, space: int, bins: Ints) -> None:
        if space and bins.size:
            others = self._by_space.get(space)
            self._by_space[space] = bins if others is None else np.concatenate([others, bins])
            self._spaces |= 1 << space


GROUP = 1 << 20  # documents that are packed together: enough for a close fit


@dataclass(frozen=True)
class DocumentPieces:
    """Token ranges to pack into samples, in n rows.
    A row is a document or a segment of one (w = 1), or w sequences that belong together.

    Attributes:
        starts: int64 [n, w], position of the first token of each sequence in the data set.
        sizes: int64 [n, w], number of positions of each sequence (its tokens minus one), at most S per row.
        summary: text for the log about documents that were split or left out.
    """

    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    summary: str


def split_documents_into_segments(
    reader: IndexedReader, begins: Ints, ends: Ints, seq_length: int, *, split: bool
) -> DocumentPieces:
    """Return the documents as segments that each fit a sample; longer documents are split, or left out without `split`.

    Documents have the token ranges [begins, ends); those of fewer than two tokens are left out.

    Raises:
        DataError: if no document fits.
    """
    sizes = ends - begins - 1
    long = sizes > seq_length
    counts = np.where(sizes <= 0, 0, -(-sizes // seq_length) if split else ~long)
    owner = np.repeat(np.arange(sizes.size), counts)
    if not owner.size:
        raise DataError(
            f"{reader.prefix}: none of its {begins.size} documents has from 2 to seq_length + 1 = {seq_length + 1} tokens",
            hint="set data.kind: text to read across document ends, or data.long_documents: split to split long ones",
        )
    number = np.arange(owner.size) - (np.cumsum(counts) - counts)[owner]
    starts = begins[owner] + number * seq_length
    piece_sizes = np.minimum(seq_length, ends[owner] - 1 - starts)
    summary = (
        f"{long.sum()} documents longer than seq_length + 1 = {seq_length + 1} {'split' if split else 'left out'},"
        f" {(sizes <= 0).sum()} of fewer than two tokens left out"
    )
    return DocumentPieces(starts[:, None], piece_sizes[:, None], summary)


def pack_document_segments(pieces: DocumentPieces, seq_length: int, key: int) -> Arrays:
    """Return index arrays (`starts`, `sizes`, `bins`) of segments packed into samples of `seq_length` positions by best fit.
    They are packed in groups of `GROUP` (1 Mi) drawn by the 64-bit `key`.

    Returns:
        starts: int64 [n w], sizes: int32 [n w], of the pieces in the order of their samples. Within a sample small rows
            come first, which balances attention over the ranks of context parallelism (`get_context_rank_chunks`).
        bins: int64 [samples + 1], the first piece of each sample, and n w.
    """
    totals = pieces.sizes.sum(1)
    order = permute_indices(np.arange(totals.size), totals.size, key)
    packed, bounds = [], [np.zeros(1, np.int64)]
    for first in range(0, order.size, GROUP):
        group = order[first : first + GROUP]
        sizes = totals[group]
        bins = assign_bins_best_fit(sizes, seq_length)
        packed.append(group[np.lexsort((sizes, bins))])
        bounds.append(first + np.cumsum(np.bincount(bins)))
    order = np.concatenate(packed)
    return {
        "starts": pieces.starts[order].ravel(),
        "sizes": pieces.sizes[order].ravel().astype(np.int32),
        "bins": np.concatenate(bounds) * pieces.sizes.shape[1],
    }


class PackedSamples:
    """Samples of whole documents, packed without attention across documents.
    They are of one data set's share of a split. The seed draws which documents share a sample.

    An epoch reads every sample once, in an order drawn for it: a pure function of (seed, content, k), independent of
    the total. The index is built when the first sample is read, and kept in the run's cache: 12 bytes per document and
    8 per sample, read through a memory map.

    Args:
        weights: loss weight of each token as a label; None for weight 1.

    Raises:
        DataError: on the first sample, if no document fits.
    """

    def __init__(self, part: DatasetPart, setting: DatasetContext, *, weights: LossWeights | None = None) -> None:
        self._part, self._setting, self._weights = part, setting, weights
        self._seq_length = setting.config.seq_length
        self._key = (-1, 0)  # the epoch that was read last, and the key of its order

    @cached_property
    def content_key(self) -> str:
        """Text that names everything the packed samples depend on; equal texts mean equal samples."""
        part, setting = self._part, self._setting
        return (
            f"{self._packing_rule} seed={setting.seed} seq={self._seq_length} long={setting.config.long_documents}"
            f" data={part.reader.fingerprint} range={part.first}:{part.last}"
            + ("" if self._weights is None else f" weights={self._weights.fingerprint}")
        )

    @property
    def _packing_rule(self) -> str:
        """Name of the packing rule, part of `content_key`."""
        return "packed"

    @cached_property
    def _index(self) -> Arrays:
        return load_or_build_arrays(self._setting.cache, self.content_key, self._pack_documents)

    def _pack_documents(self) -> Arrays:
        reader = self._part.reader
        pieces = self._list_pieces(reader)
        reader.close()
        arrays = pack_document_segments(pieces, self._seq_length, xxhash.xxh3_64_intdigest(self.content_key.encode()))
        samples = arrays["bins"].size - 1
        full = 100 * pieces.sizes.sum() / (samples * self._seq_length)
        logger.info("%s: %d samples, filled to %.2f %%; %s", reader.prefix, samples, full, pieces.summary)
        return arrays

    def _list_pieces(self, reader: IndexedReader) -> DocumentPieces:
        """Return the pieces to pack."""
        bounds = find_document_bounds(reader, self._part.first, self._part.last)
        return split_documents_into_segments(
            reader, *bounds, self._seq_length, split=self._setting.config.long_documents == "split"
        )

    @property
    def samples_per_epoch(self) -> float:
        """Number of packed samples in one pass over the data set's share of the split; builds the index on first use."""
        return self._index["bins"].size - 1

    @cached_property
    def _attention_work(self) -> npt.NDArray[np.int64]:
        index = self._index
        return np.add.reduceat(index["sizes"].astype(np.int64) ** 2, index["bins"][:-1])

    def estimate_attention_work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the attention work of samples: their numbers of attended (query, key) token pairs.
        The samples are `numbers`; the result is int64 [len(numbers)], squared document lengths, added up.
        """
        count = self._index["bins"].size - 1
        epochs, positions = np.divmod(numbers, count)
        for epoch in np.unique(epochs).tolist():
            within = epochs == epoch
            positions[within] = permute_indices(positions[within], count, self._get_epoch_key(epoch))
        work: npt.NDArray[np.int64] = self._attention_work[positions]
        return work

    def _get_epoch_key(self, epoch: int) -> int:
        """Return the key that draws the order of an epoch."""
        last, key = self._key
        if last != epoch:
            key = xxhash.xxh3_64_intdigest(f"{self.content_key} epoch={epoch}".encode())
            self._key = epoch, key
        return key

    def __getitem__(self, k: int, /) -> TrainingSample:
        starts, sizes = self._locate_pieces(k)
        documents = self._read_documents(k, starts, sizes)
        if self._weights is None:
            return self._build_sample(documents, None)
        return self._build_sample(
            documents, [self._read_label_weights(at, size) for at, size in zip(starts, sizes, strict=True)]
        )

    def _read_label_weights(self, at: int, size: int) -> npt.NDArray[np.float32]:
        """Return the loss weights of the labels of a document at token `at`: of its tokens except the first."""
        assert self._weights is not None
        return self._weights[at + 1 : at + size + 1]

    def _locate_pieces(self, k: int) -> tuple[list[int], list[int]]:
        """Return the first token of each document of sample k, and the number of its positions."""
        count = self._index["bins"].size - 1
        epoch, position = divmod(k, count)
        number = permute_index(position, count, self._get_epoch_key(epoch))
        first, last = self._index["bins"][number : number + 2].tolist()
        return self._index["starts"][first:last].tolist(), self._index["sizes"][first:last].tolist()

    def _read_documents(self, k: int, starts: list[int], sizes: list[int]) -> list[Tokens]:
        """Return the tokens of the documents of sample k."""
        tokens = self._part.reader.tokens
        return [tokens[start : start + size + 1] for start, size in zip(starts, sizes, strict=True)]

    def _build_sample(
        self, documents: list[Tokens], label_weights: list[npt.NDArray[np.float32]] | None
    ) -> TrainingSample:
        """Build a sample from whole documents and the weights of their labels (all tokens except the first)."""
        length, sizes = self._seq_length, [document.size - 1 for document in documents]
        tokens = np.full(length, self._setting.eod or 0, np.int64)
        labels, weights = tokens.copy(), np.zeros(length, np.float32)
        begins = [0]
        for document, size in zip(documents, sizes, strict=True):
            span = slice(begins[-1], begins[-1] + size)
            tokens[span], labels[span] = document[:-1], document[1:]
            begins.append(span.stop)
        used = begins[-1]
        weights[:used] = 1.0 if label_weights is None else np.concatenate(label_weights)
        sizes.append(length - used)  # the padding is a document as well
        document_ids = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        return TrainingSample(tokens, labels, weights, np.arange(length) - np.repeat(begins, sizes), document_ids)


class WholeDocumentSamples(PackedSamples):
    """Packed samples of documents of several sequences that belong together, such as the two answers of a pair.
    Each document is in one sample; documents that do not fit a sample are left out and counted.

    Subclasses set `_sequences`, the number of sequences of a document in the token files; `_texts`, the number of its first
    ones that are packed (the others are labels); and for messages `_noun`, the plural name of documents, and `_fit_hint`,
    the fix if none fits.
    """

    _sequences: int
    _texts: int
    _noun: str
    _fit_hint: str

    def _list_pieces(self, reader: IndexedReader) -> DocumentPieces:
        kind, bounds = self._part.kind, reader.document_index
        first, last = np.searchsorted(bounds, [self._part.first, self._part.last])
        if (np.diff(bounds[first : last + 1]) != self._sequences).any():
            count = "two" if self._sequences == 2 else self._sequences
            raise DataError(
                f"{reader.prefix}: data.kind = {kind} requires documents of {count} sequences, and some have another number",
                hint=f"build the data set with mega data preprocess --kind {kind}",
            )
        part = slice(self._part.first, self._part.last)
        sizes = reader.lengths[part].astype(np.int64).reshape(-1, self._sequences)[:, : self._texts]
        starts = reader.pointers[part].reshape(-1, self._sequences)[:, : self._texts] // reader.dtype.itemsize
        fits = sizes.sum(1) <= self._seq_length
        if not fits.any():
            raise DataError(
                f"{reader.prefix}: none of its {fits.size} {self._noun} fits into data.seq_length = {self._seq_length}",
                hint=self._fit_hint,
            )
        summary = f"{(~fits).sum()} of {fits.size} {self._noun} exceed seq_length = {self._seq_length} and are left out"
        return DocumentPieces(starts[fits], sizes[fits], summary)

    def _read_documents(self, k: int, starts: list[int], sizes: list[int]) -> list[Tokens]:
        """Return the tokens of each text of sample k, with one more, as the last token of a text has no label."""
        tokens = self._part.reader.tokens
        return [np.append(tokens[at : at + size], tokens[at]) for at, size in zip(starts, sizes, strict=True)]


def find_document_bounds(reader: IndexedReader, first: int, last: int) -> tuple[Ints, Ints]:
    """Return the token positions (begins, ends) of the documents that begin in the sequences [first, last).

    The results are int64 [documents] each.
    """
    bounds = reader.document_index
    documents = np.searchsorted(bounds[:-1], [first, last])
    edges = np.append(reader.pointers // reader.dtype.itemsize, reader.num_tokens)[
        bounds[documents[0] : documents[1] + 1]
    ]
    return edges[:-1], edges[1:]


def build_packed_samples(
    part: DatasetPart, setting: DatasetContext, _: int, *, weights: LossWeights | None = None
) -> PackedSamples:
    """Return the packed samples of whole documents of one data set's share of a split.
    The dataset kind is `documents`, or conversations with loss `weights`.

    Raises:
        ConfigError: as `reject_megatron_order`.
    """
    reject_megatron_order(part, setting)
    return PackedSamples(part, setting, weights=weights)


def reject_megatron_order(part: DatasetPart, setting: DatasetContext) -> None:
    """Raise ConfigError if the run's sample order is `megatron`, which does not support packing."""
    if setting.config.sample_order == "megatron":
        raise ConfigError(
            f"{part.reader.prefix}: kind {part.kind} is not supported with data.order = megatron, which has no packing",
            hint="set data.order: stable",
        )
