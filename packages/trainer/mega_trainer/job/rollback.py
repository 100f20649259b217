"""Going back: to an earlier checkpoint, and past the samples that spoiled what came after it.

As PaLM's training did at its spikes (arXiv:2204.02311, section 5.1): the state of before, other samples. What is left out
belongs to the state, so that a run that is resumed, or replayed, reads the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_data.kinds.base import Sample
from mega_data.kinds.t5 import T5Sample
from mega_data.loader import Samples


class RollBack(Exception):
    """A step's numbers ask for an earlier checkpoint. Raised alike on all ranks.

    Attributes:
        step: the bad one.
        message: what is wrong with it.
    """

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step, self.message = step, message


@dataclass(frozen=True)
class LeftOut:
    """Samples that a run goes past: of each range, how many samples it had consumed there, and how many it leaves out.

    >>> [LeftOut(((4, 2),)).position(k) for k in (0, 3, 4, 5)]
    [0, 3, 6, 7]
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> LeftOut:
        """What a checkpoint's state tells."""
        return cls(tuple((at, count) for at, count in saved.get("left_out", ())))

    def position(self, consumed: int) -> int:
        """Where in the order of the data a run is that has consumed so many samples: that of its next one."""
        return consumed + sum(count for at, count in self.ranges if at <= consumed)

    def to(self, position: int, consumed: int) -> LeftOut:
        """With all left out from where a run is that has consumed so many samples up to a position."""
        return LeftOut((*self.ranges, (consumed, position - self.position(consumed))))

    def told(self, consumed: int, count: int) -> str:
        """The numbers, in the order of the data, of the next `count` samples."""
        return f"samples {self.position(consumed)} to {self.position(consumed + count - 1)}"


@dataclass(frozen=True)
class Remaining(Samples):
    """The samples of a data set but those that are left out."""

    dataset: Samples
    left_out: LeftOut

    def __getitem__(self, k: int, /) -> Sample | T5Sample:
        return self.dataset[self.left_out.position(k)]

    def work(self, numbers: Sequence[int], /) -> npt.NDArray[np.int64]:
        """As in `kinds.base.Samples`."""
        return self.dataset.work([self.left_out.position(k) for k in numbers])
