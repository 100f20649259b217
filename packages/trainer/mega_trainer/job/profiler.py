"""Profiles of selected steps: traces, memory snapshots, and the time of each phase (`phase_timer`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from mega_common.progress_logging import logger
from mega_trainer.config.run_config import RunConfig
from mega_trainer.job.phase_timer import DeviceTimestamp, PhaseTimer

T = TypeVar("T")
MEMORY_EVENTS = 1_000_000  # allocations in a snapshot, about 100 bytes each


class StepProfiler:
    """Profiler of this rank's training steps, which writes traces into `<output>/profile/`.
    `config.profile` configures it; without that section it only times phases.
    """

    def __init__(self, config: RunConfig, device: torch.device, rank: int, phases: PhaseTimer) -> None:
        settings, self._phases = config.profile, phases
        self._settings = settings if settings is not None and rank in settings.ranks else None
        self._folder, self._rank, self._device = Path(config.output) / "profile", rank, device
        self._own: PhaseTimer | None = None  # of the step, if it is profiled

    def profile_steps(self, items: Iterable[T], first: int) -> Iterator[T]:
        """Yield `items`, one per training step from step `first` on, and profile the configured steps among them.
        The time between two items is profiled as the step of the first of them.
        """
        if self._settings is None:
            yield from items
            return
        begin, end = self._settings.steps
        rest, number = iter(items), first
        while number < begin and (item := next(rest, None)) is not None:
            yield item
            number += 1
        if number <= end:
            with self._trace_steps(number, end):
                while number <= end and (timed := self._begin_step(rest)) is not None:
                    mark, item = timed
                    try:
                        yield item
                    finally:  # a run may end after any step
                        self._log_phases(number, mark)
                    number += 1
        yield from rest

    def time_phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose `with` block is timed as the phase `name` of the step."""
        return self._phases.time_phase(name) if self._own is None else self._record_phase(name, self._own)

    @contextmanager
    def _record_phase(self, name: str, own: PhaseTimer) -> Iterator[None]:
        with record_function(name), own.time_phase(name), self._phases.time_phase(name):
            yield

    def _begin_step(self, rest: Iterator[T]) -> tuple[DeviceTimestamp, T] | None:
        """Return the start mark of a step, and its item."""
        self._own, begin = PhaseTimer(self._device), DeviceTimestamp(self._device)
        item = next(rest, None)
        return None if item is None else (begin, item)

    def _log_phases(self, step: int, begin: DeviceTimestamp) -> None:
        assert self._own is not None
        seconds = {
            "seconds": DeviceTimestamp(self._device).seconds_since(begin),
            **self._own.take_phase_durations(),
        }  # the device has finished, so all durations are known
        with open(self._folder / f"phases-rank{self._rank}.jsonl", "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **seconds}) + "\n")
        parts = ", ".join(f"{name} {1000 * part:.1f}" for name, part in seconds.items() if name != "seconds")
        logger.info("step %d: %.1f ms = %s", step, 1000 * seconds["seconds"], parts)

    @contextmanager
    def _trace_steps(self, first: int, last: int) -> Iterator[None]:
        assert self._settings is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank{self._rank}-steps-{first}-{last}"
        on_gpu = self._device.type == "cuda"
        if self._settings.memory and not on_gpu:
            logger.info("profile.memory has no effect without a GPU")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        tracing = profile(activities=activities) if self._settings.trace else None
        if self._settings.memory and on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        try:
            with tracing or nullcontext():
                yield
        finally:
            self._own = None
            if self._settings.memory and on_gpu:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"memory-{name}.pickle"))  # type: ignore[no-untyped-call]
                torch.cuda.memory._record_memory_history(enabled=None)
            if tracing is not None:
                tracing.export_chrome_trace(str(self._folder / f"trace-{name}.json"))
        logger.info("profiled: %s", self._folder)
