"""Python's garbage collection at fixed steps, so that all ranks pause together."""

from __future__ import annotations

import gc


class GarbageCollectionSchedule:
    """Context manager that restricts Python's garbage collection to the end of every `every`-th step; 0 leaves it to
    Python.

    Objects that exist at the start are frozen: later collections skip them.
    """

    def __init__(self, every: int) -> None:
        self._every, self._was_on = every, gc.isenabled()

    def __enter__(self) -> GarbageCollectionSchedule:
        if self._every:
            gc.collect()
            gc.freeze()
            gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        if self._every:
            gc.unfreeze()
            if self._was_on:
                gc.enable()

    def collect_after_step(self, step: int) -> None:
        """Run Python's garbage collection if it is due after this step."""
        if self._every and step % self._every == 0:
            gc.collect()
