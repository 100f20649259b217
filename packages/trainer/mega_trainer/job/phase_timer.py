"""Time of each phase of a step, measured without waiting for the device.

Phases: `data` (waiting for the loader), `forward` and `backward` of all micro-batches, `forward_backward` (both in turn), `pipeline` (messages between stages, and
waiting for them), `reduce` (gradient reduction that remains after the backwards), `norm` (and the all-reduce of the step's
scalars), `update`, `evaluate`, `save`. A nested phase is not counted in the outer one, so phases add up to the measured time.
On a GPU they are times of the current stream, between events that are read after the device has passed them; work on other
streams, such as overlapped reductions, appears in a trace (`profile`).
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
WHOLE = "evaluate"  # phase whose nested phases are counted in it: its forwards are not training


class DeviceTimestamp:
    """Point in time, for measuring durations: on a GPU, of the device's current stream; on CPU, of this process."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None  # type: ignore[no-untyped-call]
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record()

    @property
    def has_passed(self) -> bool:
        """True if the device has reached this point in time."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, other: DeviceTimestamp) -> float:
        """Return the seconds from the timestamp `other` to this one, after waiting for the device to reach this one."""
        if self._event is None or other._event is None:
            return self._time - other._time
        self._event.synchronize()
        return float(other._event.elapsed_time(self._event)) / 1000


class PhaseTimer:
    """Timer of the phases of this rank's steps, such as `data` or `save`.

    Attributes:
        current: the phase at this moment, "" between phases.
    """

    def __init__(self, device: torch.device) -> None:
        self.current, self._device = "", device
        self._marks = deque([("", DeviceTimestamp(device))])  # phase, and its start

    @contextmanager
    def time_phase(self, name: str) -> Iterator[None]:
        """Time the `with` block as the phase `name` of the step."""
        outer = self.current
        self._begin_phase(outer if outer == WHOLE else name)
        try:
            yield
        finally:
            self._begin_phase(outer)

    def take_phase_durations(self) -> dict[str, float]:
        """Return {phase: seconds}, the time spent in each phase since the last call.

        Phases that the device has not finished are returned by a later call.
        """
        self._begin_phase(self.current)
        seconds: defaultdict[str, float] = defaultdict(float)
        while len(self._marks) > 1 and self._marks[1][1].has_passed:
            name, begin = self._marks.popleft()
            seconds[name] += self._marks[0][1].seconds_since(begin)
        seconds.pop("", None)
        return dict(seconds)

    def _begin_phase(self, name: str) -> None:
        self.current = name
        self._marks.append((name, DeviceTimestamp(self._device)))


def time_data_waits(items: Iterable[T], phase: Callable[[str], AbstractContextManager[None]]) -> Iterator[T]:
    """Yield the items; the wait for each is timed as the phase `data`, by `phase("data")`."""
    rest = iter(items)
    while True:
        with phase("data"):
            item = next(rest, None)
        if item is None:
            return
        yield item
