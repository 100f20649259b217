"""Rollback to an earlier checkpoint that skips the samples read since, as in PaLM's training after loss spikes
(arXiv:2204.02311, section 5.1).

Skipped ranges are part of the saved state, so that a resumed or replayed run reads the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_data.batch_loader import LoadableDataset
from mega_data.kinds.dataset_kind import TrainingSample
from mega_data.kinds.t5_samples import T5Sample


class RollbackRequested(Exception):
    """Exception that requests a return to an earlier checkpoint after a bad step. Raised on all ranks.

    Attributes:
        step: of the bad numbers.
        message: description of the problem.
    """

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step, self.message = step, message


@dataclass(frozen=True)
class SkippedRanges:
    """Ranges of samples that a run skips after rollbacks: for each range, the samples consumed before it, and the
    number of samples skipped.

    >>> [SkippedRanges(((4, 2),)).data_position(k) for k in (0, 3, 4, 5)]
    [0, 3, 6, 7]
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_checkpoint_state(cls, saved: Mapping[str, Any]) -> SkippedRanges:
        """Return the skipped ranges in the saved state of a checkpoint."""
        return cls(tuple((at, count) for at, count in saved.get("left_out", ())))

    def data_position(self, consumed: int) -> int:
        """Return the position in the data order of the sample that is read after `consumed` samples, skipped ones
        included in the position.
        """
        return consumed + sum(count for at, count in self.ranges if at <= consumed)

    def skip_to_position(self, position: int, consumed: int) -> SkippedRanges:
        """Return the ranges extended by one that skips all samples from the position after `consumed` samples up to
        `position`.
        """
        return SkippedRanges((*self.ranges, (consumed, position - self.data_position(consumed))))

    def format_samples(self, consumed: int, count: int) -> str:
        """Return a text that names the positions, in the order of the data, of the next `count` samples after
        `consumed` samples.
        """
        return f"samples {self.data_position(consumed)} to {self.data_position(consumed + count - 1)}"


@dataclass(frozen=True)
class UnskippedSamples(LoadableDataset):
    """View of a data set without the skipped ranges of samples."""

    dataset: LoadableDataset
    skipped_ranges: SkippedRanges

    def __getitem__(self, k: int, /) -> TrainingSample | T5Sample:
        return self.dataset[self.skipped_ranges.data_position(k)]

    def estimate_attention_work(self, numbers: Sequence[int], /) -> npt.NDArray[np.int64]:
        """Return the estimated attention work of each of the samples `numbers`, as
        `LoadableDataset.estimate_attention_work` does.
        """
        return self.dataset.estimate_attention_work([self.skipped_ranges.data_position(k) for k in numbers])
