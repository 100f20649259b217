"""Where the time of each step goes, told without a wait for the device.

Phases: `data` (waiting for the loader), `forward` and `backward` of all micro-batches, `pipeline` (messages from and to other
stages, and waiting for them), `reduce` (what is left of the sums over ranks when the backwards are done), `norm` (and the
numbers that ranks tell each other), `update`, `evaluate`, `save`. A phase within another is not counted in that one, so that
they add up to what was measured. On a GPU they are times of its stream, between events that are read when it has passed them;
what runs beside it, such as sums under way, is in a trace (`profile`).
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
WHOLE = "evaluate"  # its forwards are no training's


class Moment:
    """Of the device's current stream, or of this process."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None  # type: ignore[no-untyped-call]
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record()

    @property
    def passed(self) -> bool:
        """Whether the device has come here."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def since(self, other: Moment) -> float:
        """Seconds from the other one to this; waits for the device to come here."""
        if self._event is None or other._event is None:
            return self._time - other._time
        self._event.synchronize()
        return float(other._event.elapsed_time(self._event)) / 1000


class Phases:
    """The time of each phase of this rank's steps.

    Attributes:
        current: the phase at this moment, "" between phases.
    """

    def __init__(self, device: torch.device) -> None:
        self.current, self._device = "", device
        self._marks = deque([("", Moment(device))])  # which phase began, and when

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Around a part of a step."""
        outer = self.current
        self._begin(outer if outer == WHOLE else name)
        try:
            yield
        finally:
            self._begin(outer)

    def take(self) -> dict[str, float]:
        """Seconds of each phase since the last call. What a device has not come to the end of is told the next time."""
        self._begin(self.current)
        seconds: defaultdict[str, float] = defaultdict(float)
        while len(self._marks) > 1 and self._marks[1][1].passed:
            name, begin = self._marks.popleft()
            seconds[name] += self._marks[0][1].since(begin)
        seconds.pop("", None)
        return dict(seconds)

    def _begin(self, name: str) -> None:
        self.current = name
        self._marks.append((name, Moment(self._device)))


def waited(items: Iterable[T], phase: Callable[[str], AbstractContextManager[None]]) -> Iterator[T]:
    """The items; what is waited for each is the phase `data`."""
    rest = iter(items)
    while True:
        with phase("data"):
            item = next(rest, None)
        if item is None:
            return
        yield item
