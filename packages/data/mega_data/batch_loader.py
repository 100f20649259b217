"""Batches for optimizer steps; the samples of a step depend only on the consumed samples and the global batch size."""

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
from mega_data.kinds.dataset_kind import SampleImages, TrainingSample
from mega_data.kinds.t5_samples import T5Sample

Scalar = TypeVar("Scalar", bound=np.generic)


class LoadableDataset(Protocol):
    """Interface of the data sets that a `BatchLoader` reads: they return sample k and estimate its attention work."""

    def __getitem__(self, k: int, /) -> TrainingSample | T5Sample: ...

    def estimate_attention_work(self, numbers: Sequence[int], /) -> npt.NDArray[np.int64]:
        """Return the approximate attention work of samples: their numbers of attended (query, key) token pairs.
        The samples are `numbers`; the result is int64 [len(numbers)].
        """


@dataclass(frozen=True)
class EncoderInput:
    """Encoder input of an encoder-decoder batch of n samples.
    It has token ids, int64 [n, encoder length], and numbers of tokens without padding, int64 [n].
    """

    tokens: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepBatch:
    """All n samples that one data-parallel rank reads for one optimizer step.
    They are tokens, labels, loss weights, positions and document ids, each [n, S] for sequence length S.

    Attributes:
        sample_ids: int64 [n], the samples' numbers in the data set.
        images: images of each sample, or None; empty if no data set has images.
        source: encoder input of samples for an encoder-decoder; the other fields are then those of the decoder.
        pair_labels: int64 [n].
        neighbors: int64 [n, S / m, K, 2m], as in `TrainingSample`; all -1 for samples without neighbors, and None if no
            sample has any.
        targets: fp32 [n, S], labels as in `TrainingSample`; None without labels.
        group_size: as in `TrainingSample`, equal for all samples.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_weights: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32] | None
    sample_ids: npt.NDArray[np.int64]
    images: Sequence[SampleImages | None] = ()
    source: EncoderInput | None = None
    token_types: npt.NDArray[np.int64] | None = None
    pair_labels: npt.NDArray[np.int64] | None = None
    neighbors: npt.NDArray[np.int64] | None = None
    targets: npt.NDArray[np.float32] | None = None
    group_size: int | None = None


class BatchLoader:
    """Iterator over one data-parallel rank's share of successive global batches, as `StepBatch`.

    A step has the samples [g, g + global_batch); each rank gets n = global_batch / dp_size of them, by
    `assign_samples_to_ranks`. For a batch size that changes, `global_batch` is a function of the consumed samples.
    `consumed_samples` is the only state: the number of samples of all returned batches, over all ranks. A loader
    created with that number continues with the next batch, in any world size.

    One thread reads `prefetch` batches ahead; its errors are raised in place of the batch.

    Raises:
        ConfigError: if the global batch is not a multiple of the number of data ranks.
    """

    def __init__(
        self,
        dataset: LoadableDataset,
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
        self._divide_batch(self._size_at(consumed_samples))

    def __iter__(self) -> Iterator[StepBatch]:
        ahead: deque[tuple[int, Future[StepBatch]]] = deque()
        position = self.consumed_samples
        reader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        try:
            while True:
                while len(ahead) <= self._prefetch:
                    size = self._size_at(position)
                    ahead.append((size, reader.submit(self._load_batch, position, self._divide_batch(size))))
                    position += size
                size, coming = ahead.popleft()
                batch = coming.result()
                self.consumed_samples += size
                yield batch
        finally:
            # Do not wait: the current read ends by itself, and queued ones are dropped.
            reader.shutdown(wait=False, cancel_futures=True)

    def _divide_batch(self, global_batch: int) -> int:
        if global_batch % self._dp_size:
            raise ConfigError(
                f"batch.global = {global_batch}: must be a multiple of the {self._dp_size} data-parallel ranks",
                hint=f"use a multiple of {self._dp_size}",
            )
        return global_batch // self._dp_size

    def _load_batch(self, begin: int, share: int) -> StepBatch:
        ids = begin + self._select_own_samples(range(begin, begin + share * self._dp_size))
        loaded = [self._dataset[k] for k in ids.tolist()]
        samples = [sample for sample in loaded if isinstance(sample, TrainingSample)]
        if not samples:
            return _stack_t5_samples([sample for sample in loaded if isinstance(sample, T5Sample)], ids)
        documents = [sample.document_ids for sample in samples]
        types = [sample.token_types for sample in samples if sample.token_types is not None]
        targets = [sample.targets for sample in samples if sample.targets is not None]
        labels = [sample.pair_label for sample in samples if sample.pair_label is not None]
        return StepBatch(
            tokens=self._stack_rows([sample.tokens for sample in samples]),
            labels=self._stack_rows([sample.labels for sample in samples]),
            loss_weights=self._stack_rows([sample.loss_weights for sample in samples]),
            position_ids=self._stack_rows([sample.position_ids for sample in samples]),
            document_ids=None
            if all(ids is None for ids in documents)
            else self._stack_rows([*map(self._fill_document_ids, documents)]),
            sample_ids=ids,
            token_types=self._stack_rows(types) if types else None,
            pair_labels=np.array(labels) if labels else None,
            images=[sample.images for sample in samples],
            neighbors=_stack_neighbors(samples),
            targets=self._stack_rows(targets) if targets else None,
            group_size=_find_group_size(samples),
        )

    def _select_own_samples(self, step: range) -> npt.NDArray[np.int64]:
        if self._dp_size == 1:
            return np.arange(len(step))
        assigned = assign_samples_to_ranks(self._dataset.estimate_attention_work(step), self._dp_size)
        own: npt.NDArray[np.int64] = assigned[self._dp_rank]
        return own

    def _fill_document_ids(self, document_ids: npt.NDArray[np.int32] | None) -> npt.NDArray[np.int32]:
        """Return the document ids of a sample, or zeros for a sample that is one document."""
        return np.zeros(self._seq_length, np.int32) if document_ids is None else document_ids

    def _stack_rows(self, rows: list[npt.NDArray[Scalar]]) -> npt.NDArray[Scalar]:
        return np.stack(rows, out=np.empty((len(rows), self._seq_length), rows[0].dtype))


def _stack_neighbors(samples: Sequence[TrainingSample]) -> npt.NDArray[np.int64] | None:
    """Stack the neighbors of samples, int64 [n, S / m, K, 2m], with -1 for samples without; None if no sample has any."""
    neighbors = [sample.neighbors for sample in samples]
    first = next((each for each in neighbors if each is not None), None)
    if first is None:
        return None
    return np.stack([np.full_like(first, -1) if each is None else each for each in neighbors])


def _find_group_size(samples: Sequence[TrainingSample]) -> int | None:
    """Return the number of texts of a group, which must be equal for all samples; None without groups."""
    sizes = {sample.group_size for sample in samples}
    if len(sizes) > 1:
        raise DataError(
            "data.train: all data sets of kind groups must have the same number of negatives",
            hint="build them with the same --negatives, or data.raw.negatives",
        )
    return sizes.pop()


def _stack_t5_samples(samples: Sequence[T5Sample], ids: npt.NDArray[np.int64]) -> StepBatch:
    """Stack samples of an encoder-decoder into one batch."""
    tokens = np.stack([sample.decoder_tokens for sample in samples])
    mask = np.stack([sample.encoder_mask for sample in samples])
    lengths = mask.sum(1)
    has_inner_padding = (mask != (np.arange(mask.shape[1]) < lengths[:, None])).any(1)
    if has_inner_padding.any():
        raise DataError(
            f"sample {ids[has_inner_padding.argmax()]}: the encoder's text contains the padding token",
            hint="use a tokenizer whose padding token occurs in no text",
        )
    return StepBatch(
        tokens=tokens,
        labels=np.maximum(np.stack([sample.labels for sample in samples]), 0),
        loss_weights=np.stack([sample.loss_weights for sample in samples]),
        position_ids=np.tile(np.arange(tokens.shape[1]), (len(samples), 1)),
        document_ids=None,
        sample_ids=ids,
        source=EncoderInput(np.stack([sample.encoder_tokens for sample in samples]), lengths),
    )


def assign_samples_to_ranks(work: npt.NDArray[np.int64], ranks: int) -> npt.NDArray[np.int64]:
    """Return the sample indices of each data-parallel rank [ranks, n / ranks], equally many with about equal work.

    If all samples have equal work, they are assigned by number. Otherwise the largest come first, each to the rank with
    the least work so far that has fewer than its share (Graham 1969). So the n-th samples of the ranks, which wait for
    each other if gradients or weights are exchanged after every micro-batch, have about equal work as well.

    Args:
        work: attention work of each sample, int64 [samples].

    Returns:
        Sample numbers, int64 [ranks, samples / ranks].
    """
    share = work.size // ranks
    if (work == work[0]).all():
        return np.arange(work.size).reshape(ranks, share)
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    open_ranks = [(0, rank) for rank in range(ranks)]
    order = np.argsort(-work, kind="stable")
    for sample, size in zip(order.tolist(), work[order].tolist(), strict=True):
        total, rank = open_ranks[0]
        assigned[rank].append(sample)
        if len(assigned[rank]) < share:
            heapreplace(open_ranks, (total + size, rank))
        else:
            heappop(open_ranks)
    return np.array(assigned)
