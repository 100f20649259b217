"""When Python's garbage collector runs, and over which objects. A collection over the objects of the imported libraries,
some 400,000, takes a quarter of a second of processor time, at a moment of its own on each rank.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def exclude_objects_from_gc() -> Iterator[None]:
    """Context manager that excludes all objects that exist when it is entered from Python's garbage collection.
    A process that has excluded objects before (`gc.freeze`) keeps them, and no others are excluded.
    """
    gc.collect()
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class GarbageCollectionSchedule(contextlib.ExitStack):
    """Context manager that restricts Python's garbage collection to the end of every `every`-th step.
    0 leaves it to Python. Objects that exist at the start are excluded (`exclude_objects_from_gc`).
    """

    def __init__(self, every: int) -> None:
        super().__init__()
        self._every = every

    def __enter__(self) -> GarbageCollectionSchedule:
        if self._every:
            self.enter_context(exclude_objects_from_gc())
            if gc.isenabled():
                self.callback(gc.enable)
            gc.disable()
        return self

    def collect_after_step(self, step: int) -> None:
        """Run Python's garbage collection if it is due after this step."""
        if self._every and step % self._every == 0:
            gc.collect()
