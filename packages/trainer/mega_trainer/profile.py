"""Where the time and the memory of some steps go: traces, memory snapshots, and the time of each phase.

Phases: `data` (waiting for the loader), `forward` and `backward` of all micro-batches, `reduce` (what is left of the sums over
ranks when the backwards are done), `norm` (and the numbers that ranks tell each other), `update`. On a GPU they are times of
its stream, between events; what runs beside it, such as sums under way, is in the trace.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mega_common.log import logger
from mega_trainer.config import RunConfig

T = TypeVar("T")
MEMORY_EVENTS = 1_000_000  # allocations that a snapshot can tell of; some 100 bytes each


class Profiler:
    """Profiles this rank's steps as `config.profile` says, into `<output>/profile/`; without it, does nothing."""

    def __init__(self, config: RunConfig, device: torch.device, rank: int) -> None:
        settings = config.profile
        self._settings = settings if settings is not None and rank in settings.ranks else None
        self._folder, self._rank, self._device = Path(config.output) / "profile", rank, device
        self._marks: dict[str, list[tuple[_Mark, _Mark]]] | None = None  # of the step, if it is profiled

    def steps(self, items: Iterable[T], first: int) -> Iterator[T]:
        """The items, one for each step from `first` on; what is done between two is that step."""
        if self._settings is None:
            yield from items
            return
        begin, end = self._settings.steps
        rest, number = iter(items), first
        while number < begin and (item := next(rest, None)) is not None:
            yield item
            number += 1
        if number <= end:
            with self._traced(number, end):
                while number <= end and (timed := self._begun(rest)) is not None:
                    mark, item = timed
                    yield item
                    self._tell(number, mark)
                    number += 1
        yield from rest

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a part of a step."""
        return nullcontext() if self._marks is None else self._timed(self._marks[name], name)

    @contextmanager
    def _timed(self, marks: list[tuple[_Mark, _Mark]], name: str) -> Iterator[None]:
        with record_function(name):
            begin = _Mark(self._device)
            yield
            marks.append((begin, _Mark(self._device)))

    def _begun(self, rest: Iterator[T]) -> tuple[_Mark, T] | None:
        """The step's begin, and its item."""
        self._marks = defaultdict(list)
        begin = _Mark(self._device)
        with self.phase("data"):
            item = next(rest, None)
        return None if item is None else (begin, item)

    def _tell(self, step: int, begin: _Mark) -> None:
        assert self._marks is not None
        end = _Mark(self._device)
        seconds = {"seconds": end.since(begin)}
        seconds |= {name: sum(b.since(a) for a, b in marks) for name, marks in self._marks.items()}
        with open(self._folder / f"phases-rank{self._rank}.jsonl", "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **seconds}) + "\n")
        parts = ", ".join(f"{name} {1000 * part:.1f}" for name, part in seconds.items() if name != "seconds")
        logger.info("step %d: %.1f ms = %s", step, 1000 * seconds["seconds"], parts)

    @contextmanager
    def _traced(self, first: int, last: int) -> Iterator[None]:
        assert self._settings is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._rank}-steps-{first}-{last}"
        on_gpu = self._device.type == "cuda"
        if self._settings.memory and not on_gpu:
            logger.info("profile.memory: snapshots are of a GPU's memory, and this run has none")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        tracing = profile(activities=activities) if self._settings.trace else None
        if self._settings.memory and on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        with tracing or nullcontext():
            try:
                yield
            finally:
                self._marks = None
                if self._settings.memory and on_gpu:
                    torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-{name}.pickle"))  # type: ignore[no-untyped-call]
                    torch.cuda.memory._record_memory_history(enabled=None)
        if tracing is not None:
            tracing.export_chrome_trace(str(self._folder / f"trace-{name}.json"))
        logger.info("profiled: %s", self._folder)


class _Mark:
    """A moment: of the device's current stream, or of this process."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._event = torch.cuda.Event(enable_timing=True) if on_gpu else None  # type: ignore[no-untyped-call]
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def since(self, other: _Mark) -> float:
        """Seconds from the other one to this; waits for the device to come here."""
        if self._event is None or other._event is None:
            return self._time - other._time
        self._event.synchronize()
        return float(other._event.elapsed_time(self._event)) / 1000
