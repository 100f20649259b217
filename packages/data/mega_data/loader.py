"""Batches for optimizer steps. Which samples a step has depends on the consumed samples and the global batch alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mega_common.errors import ConfigError
from mega_data.gpt_dataset import Sample

Scalar = TypeVar("Scalar", bound=np.generic)


class Samples(Protocol):
    """Anything that makes sample k."""

    def __getitem__(self, k: int, /) -> Sample: ...


@dataclass(frozen=True)
class StepBatch:
    """One rank's n samples of one optimizer step; fields as in `Sample`, stacked to [n, S].

    Attributes:
        sample_ids: int64 [n], the samples' numbers in the data set.
    """

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    position_ids: npt.NDArray[np.int64]
    document_ids: npt.NDArray[np.int32] | None
    sample_ids: npt.NDArray[np.int64]


class Loader:
    """Yields this rank's part of one global batch after another.

    Of a step's samples [g, g + global_batch) a rank has [g + dp_rank n, g + (dp_rank + 1) n), n = global_batch / dp_size.
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
        global_batch: int,
        seq_length: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        prefetch: int = 2,
    ) -> None:
        if global_batch % dp_size:
            raise ConfigError(
                f"batch.global = {global_batch} cannot be shared evenly by {dp_size} data-parallel ranks",
                hint=f"use a multiple of {dp_size}",
            )
        self.consumed_samples = consumed_samples
        self._dataset, self._global_batch, self._seq_length = dataset, global_batch, seq_length
        self._share, self._dp_rank, self._prefetch = global_batch // dp_size, dp_rank, prefetch

    def __iter__(self) -> Iterator[StepBatch]:
        ahead: deque[Future[StepBatch]] = deque()
        reader = ThreadPoolExecutor(1, thread_name_prefix="loader")
        try:
            while True:
                while len(ahead) <= self._prefetch:
                    ahead.append(reader.submit(self._batch, self.consumed_samples + len(ahead) * self._global_batch))
                batch = ahead.popleft().result()
                self.consumed_samples += self._global_batch
                yield batch
        finally:
            # Not waiting: what is being read ends by itself, and what waits is dropped.
            reader.shutdown(wait=False, cancel_futures=True)

    def _batch(self, begin: int) -> StepBatch:
        first = begin + self._dp_rank * self._share
        ids = np.arange(first, first + self._share)
        samples = [self._dataset[k] for k in ids.tolist()]
        documents = [sample.document_ids for sample in samples if sample.document_ids is not None]
        return StepBatch(
            tokens=self._stacked([sample.tokens for sample in samples]),
            labels=self._stacked([sample.labels for sample in samples]),
            loss_mask=self._stacked([sample.loss_mask for sample in samples]),
            position_ids=self._stacked([sample.position_ids for sample in samples]),
            document_ids=self._stacked(documents) if documents else None,
            sample_ids=ids,
        )

    def _stacked(self, rows: list[npt.NDArray[Scalar]]) -> npt.NDArray[Scalar]:
        return np.stack(rows, out=np.empty((self._share, self._seq_length), rows[0].dtype))
