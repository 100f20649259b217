"""Batches for optimizer steps. Which samples a step has depends on the consumed samples and the global batch alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from heapq import heappop, heapreplace
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mega_common.errors import ConfigError, DataError
from mega_data.kinds.base import Sample, SampleImages
from mega_data.kinds.t5 import T5Sample

Scalar = TypeVar("Scalar", bound=np.generic)


class Samples(Protocol):
    """Anything that makes sample k, and tells how much work it is."""

    def __getitem__(self, k: int, /) -> Sample | T5Sample: ...

    def work(self, numbers: Sequence[int], /) -> npt.NDArray[np.int64]:
        """As in `kinds.base.Samples`."""


@dataclass(frozen=True)
class SourceTokens:
    """What the encoder of an encoder-decoder reads: int64 [n, E], and how many of each sample's are no padding, int64 [n]."""

    tokens: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepBatch:
    """One rank's n samples of one optimizer step; fields as in `Sample`, stacked to [n, S].

    Attributes:
        sample_ids: int64 [n], the samples' numbers in the data set.
        images: of each sample that has any; none at all where no data set has.
        source: of samples for an encoder-decoder, whose decoder the rest is about.
        pair_labels: int64 [n].
        neighbors: int64 [n, S / m, K, 2m], as in `Sample`; all -1 for samples that nothing is retrieved for, and None where
            there are no others.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_weights: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32] | None
    sample_ids: npt.NDArray[np.int64]
    images: Sequence[SampleImages | None] = ()
    source: SourceTokens | None = None
    token_types: npt.NDArray[np.int64] | None = None
    pair_labels: npt.NDArray[np.int64] | None = None
    neighbors: npt.NDArray[np.int64] | None = None


class Loader:
    """Yields this rank's part of one global batch after another.

    A step has the samples [g, g + global_batch), of which each rank has n = global_batch / dp_size, as `dealt` deals them.
    Where the batch is not always as large, `global_batch` tells its size from the samples consumed before it.
    `consumed_samples` is its only state: the samples of all batches handed out so far, over all ranks. A loader made
    with that number goes on with the next batch, in any world size.

    One thread reads `prefetch` batches ahead; its errors are raised where the batch would have come.

    Raises:
        ConfigError: when the ranks cannot share the global batch evenly.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        global_batch: int | Callable[[int], int],
        seq_length: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        prefetch: int = 2,
    ) -> None:
        self.consumed_samples = consumed_samples
        self._size_at = global_batch if callable(global_batch) else lambda _: global_batch
        self._dataset, self._seq_length = dataset, seq_length
        self._dp_rank, self._dp_size, self._prefetch = dp_rank, dp_size, prefetch
        self._share(self._size_at(consumed_samples))

    def __iter__(self) -> Iterator[StepBatch]:
        ahead: deque[tuple[int, Future[StepBatch]]] = deque()
        position = self.consumed_samples
        reader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        try:
            while True:
                while len(ahead) <= self._prefetch:
                    size = self._size_at(position)
                    ahead.append((size, reader.submit(self._batch, position, self._share(size))))
                    position += size
                size, coming = ahead.popleft()
                batch = coming.result()
                self.consumed_samples += size
                yield batch
        finally:
            # Not waiting: what is being read ends by itself, and what waits is dropped.
            reader.shutdown(wait=False, cancel_futures=True)

    def _share(self, global_batch: int) -> int:
        if global_batch % self._dp_size:
            raise ConfigError(
                f"batch.global = {global_batch} cannot be shared evenly by {self._dp_size} data-parallel ranks",
                hint=f"use a multiple of {self._dp_size}",
            )
        return global_batch // self._dp_size

    def _batch(self, begin: int, share: int) -> StepBatch:
        ids = begin + self._own(range(begin, begin + share * self._dp_size))
        found = [self._dataset[k] for k in ids.tolist()]
        samples = [sample for sample in found if isinstance(sample, Sample)]
        if not samples:
            return _two_sequences([sample for sample in found if isinstance(sample, T5Sample)], ids)
        documents = [sample.document_ids for sample in samples]
        types = [sample.token_types for sample in samples if sample.token_types is not None]
        labels = [sample.pair_label for sample in samples if sample.pair_label is not None]
        return StepBatch(
            tokens=self._stacked([sample.tokens for sample in samples]),
            labels=self._stacked([sample.labels for sample in samples]),
            loss_weights=self._stacked([sample.loss_weights for sample in samples]),
            position_ids=self._stacked([sample.position_ids for sample in samples]),
            document_ids=None
            if all(ids is None for ids in documents)
            else self._stacked([*map(self._or_one, documents)]),
            sample_ids=ids,
            token_types=self._stacked(types) if types else None,
            pair_labels=np.array(labels) if labels else None,
            images=[sample.images for sample in samples],
            neighbors=_neighbors(samples),
        )

    def _own(self, step: range) -> npt.NDArray[np.int64]:
        if self._dp_size == 1:
            return np.arange(len(step))
        own: npt.NDArray[np.int64] = dealt(self._dataset.work(step), self._dp_size)[self._dp_rank]
        return own

    def _or_one(self, document_ids: npt.NDArray[np.int32] | None) -> npt.NDArray[np.int32]:
        """A sample whose documents are not told apart is one document."""
        return np.zeros(self._seq_length, np.int32) if document_ids is None else document_ids

    def _stacked(self, rows: list[npt.NDArray[Scalar]]) -> npt.NDArray[Scalar]:
        return np.stack(rows, out=np.empty((len(rows), self._seq_length), rows[0].dtype))


def _neighbors(samples: Sequence[Sample]) -> npt.NDArray[np.int64] | None:
    """See `StepBatch`."""
    found = [sample.neighbors for sample in samples]
    some = next((each for each in found if each is not None), None)
    if some is None:
        return None
    return np.stack([np.full_like(some, -1) if each is None else each for each in found])


def _two_sequences(samples: Sequence[T5Sample], ids: npt.NDArray[np.int64]) -> StepBatch:
    """Of samples for an encoder and a decoder."""
    tokens = np.stack([sample.decoder_tokens for sample in samples])
    seen = np.stack([sample.encoder_mask for sample in samples])
    lengths = seen.sum(1)
    inside = (seen != (np.arange(seen.shape[1]) < lengths[:, None])).any(1)
    if inside.any():
        raise DataError(
            f"sample {ids[inside.argmax()]}: the encoder's text has the token that stands for padding",
            hint="the tokenizer's padding must be a token that no text has",
        )
    return StepBatch(
        tokens=tokens,
        labels=np.maximum(np.stack([sample.labels for sample in samples]), 0),
        loss_weights=np.stack([sample.loss_weights for sample in samples]),
        position_ids=np.tile(np.arange(tokens.shape[1]), (len(samples), 1)),
        document_ids=None,
        sample_ids=ids,
        source=SourceTokens(np.stack([sample.encoder_tokens for sample in samples]), lengths),
    )


def dealt(work: npt.NDArray[np.int64], ranks: int) -> npt.NDArray[np.int64]:
    """Which samples of a step each rank has, int64 [ranks, samples / ranks]: as many each, and about equal work, int64 [samples].

    Samples of equal work go by number, the first of them to the first rank. Others go the largest first, each to the rank
    with the least work so far that has room (Graham 1969), so that the n-th ones of the ranks, which wait for each other
    where gradients or weights are exchanged after every micro-batch, are about equal too.
    """
    share = work.size // ranks
    if (work == work[0]).all():
        return np.arange(work.size).reshape(ranks, share)
    hands: list[list[int]] = [[] for _ in range(ranks)]
    open_hands = [(0, rank) for rank in range(ranks)]
    order = np.argsort(-work, kind="stable")
    for sample, size in zip(order.tolist(), work[order].tolist(), strict=True):
        total, rank = open_hands[0]
        hands[rank].append(sample)
        if len(hands[rank]) < share:
            heapreplace(open_hands, (total + size, rank))
        else:
            heappop(open_hands)
    return np.array(hands)
