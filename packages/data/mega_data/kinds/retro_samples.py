"""Samples of text chunks with their retrieved neighbors (Retro: Borgeaud et al., arXiv:2112.04426).

A sample is S / m chunks. Every document begins a new chunk, and its last chunk is padded, without loss: so every chunk
of a sample is one that was embedded, and has its own neighbors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mega_common.errors import ConfigError, DataError
from mega_data.kinds.dataset_kind import DatasetContext, TrainingSample
from mega_data.kinds.running_text import EndOfDocumentRules
from mega_data.retrieval.neighbor_files import open_dataset_neighbors
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.sampling.document_order import DocumentOrder
from mega_data.sampling.token_windows import compute_window_start


class RetroSamples:
    """Samples for retrieval models (Retro): token windows of whole chunks, each with its retrieved neighbors.
    The setting `data.order` must be `shuffled` or `stable`.

    A label is the next token of the document: every token except the first of each document is a label once per epoch,
    apart from the last chunks of an epoch if S / m does not divide their number.

    Attributes:
        shape: shape of `neighbors` of a sample: S / m chunks, K neighbors, 2m tokens.

    Raises:
        ConfigError: for order megatron, and if S is not a multiple of the chunk length.
        DataError: without neighbors, or with those of another data set or split; if the part has no token.
    """

    def __init__(self, part: DatasetPart, setting: DatasetContext) -> None:
        config, self._part, self._seed = setting.config, part, setting.seed
        self._rules, self._seq_length, self._cache = (
            EndOfDocumentRules.from_context(setting),
            config.seq_length,
            setting.cache,
        )
        if config.sample_order == "megatron":
            raise ConfigError(
                f"{part.name}: kind retro is not supported with data.order = megatron",
                hint="set data.order: shuffled",
            )
        named = part.source.neighbors if part.source else None
        self._neighbors = open_dataset_neighbors(named, part.reader, setting.cache)
        info = self._neighbors.info
        self._length, self._drawn = info.chunk_length, config.sample_order == "shuffled"
        if self._seq_length % self._length:
            raise ConfigError(
                f"data.seq_length = {self._seq_length}: must be a multiple of {self._length}, the chunk length of"
                f" {self._neighbors.folder}",
                hint="change data.seq_length, or run mega data retrieve with a --chunk-length that divides it",
            )
        self.shape = self._seq_length // self._length, info.neighbors, 2 * self._length
        chunks = self._neighbors.chunks.find_sequence_chunks(part.first, part.last)
        self._neighbors.check_split_overlap(chunks)
        self._count = len(chunks)
        if not self._count:
            raise DataError(f"{part.name}: has no token in its sequences {part.first} to {part.last}")

    @cached_property
    def content_key(self) -> str:
        """Text that names everything the Retro samples depend on; equal texts mean equal samples."""
        part = self._part
        return (
            f"retro order={'shuffled' if self._drawn else 'stable'} seed={self._seed} seq={self._seq_length}"
            f" neighbors={self._neighbors.fingerprint} range={part.first}:{part.last}"
        )

    @property
    def samples_per_epoch(self) -> float:
        """Number of Retro samples in one pass over the data set's share of the split."""
        return max(1, self._count // self.shape[0])

    def estimate_attention_work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the estimated attention work of each sample in `numbers`, its squared length: int64 [len(numbers)]."""
        return np.full(numbers.size, self._seq_length**2)

    def __getitem__(self, k: int, /) -> TrainingSample:
        length, tokens = self._length, self._part.reader.tokens
        inputs = np.full(self._seq_length, self._rules.eod or 0, np.int64)
        labels, weights = inputs.copy(), np.zeros(self._seq_length, np.float32)
        begins, chunks, at = [], [], 0
        for document, span, units in self._find_document_chunks(k):
            first, last = span.start + units.start * length, min(span.start + units.stop * length, span.stop)
            label_end = min(last + 1, span.stop)
            inputs[at : at + last - first] = tokens[first:last]
            labels[at : at + label_end - first - 1] = tokens[first + 1 : label_end]
            weights[at : at + label_end - first - 1] = 1
            begins.append(at)
            chunks.append(self._neighbors.chunks.starts[document] + np.asarray(units))
            at += len(units) * length
        if self._rules.eod_mask_loss:
            weights[inputs == self._rules.eod] = 0
        sizes = np.diff([*begins, self._seq_length])
        positions = np.arange(self._seq_length)
        return TrainingSample(
            inputs,
            labels,
            weights,
            positions - np.repeat(begins, sizes) if self._rules.reset_position_ids else positions,
            np.repeat(np.arange(sizes.size, dtype=np.int32), sizes) if self._rules.reset_attention_mask else None,
            neighbors=self._neighbors.read_neighbor_tokens(np.concatenate(chunks)),
        )

    @cached_property
    def _document_order(self) -> DocumentOrder:
        part, seed = self._part, self._seed if self._drawn else None
        return DocumentOrder(part.reader, part.first, part.last, seed=seed, cache=self._cache, unit=self._length)

    def _find_document_chunks(self, k: int) -> Iterator[tuple[int, range, range]]:
        """Yield the documents of sample k with their chunks, as `DocumentOrder.find_documents`."""
        at, left = compute_window_start(k, self._count, self.shape[0], self.content_key), self.shape[0]
        while left:
            count = min(left, self._count - at)
            yield from self._document_order.find_documents(at, count)
            left, at = left - count, 0


def build_retro_samples(part: DatasetPart, setting: DatasetContext, _: int) -> RetroSamples:
    """Return the samples with retrieved neighbors of one data set's share of a split (dataset kind `retro`).
    They are in the run's sample order.
    """
    return RetroSamples(part, setting)
