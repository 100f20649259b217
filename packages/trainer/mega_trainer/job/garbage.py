"""Python's garbage collection at chosen steps: where each rank collects when it likes, all wait for one after another."""

from __future__ import annotations

import gc


class Garbage:
    """While a `with` block runs, garbage is collected only after each `every`-th step; 0: when Python likes.

    What is there at the start is taken to stay, and not looked at again.
    """

    def __init__(self, every: int) -> None:
        self._every, self._was_on = every, gc.isenabled()

    def __enter__(self) -> Garbage:
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

    def after(self, step: int) -> None:
        """Collect, if it is time."""
        if self._every and step % self._every == 0:
            gc.collect()
