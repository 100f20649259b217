"""The lowest validation loss of a run: which checkpoint is the best, and when it is time to stop. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Best:
    """The lowest validation loss so far.

    Attributes:
        loss: None before the first validation.
        step: after which it was.
        since: validations after that.
    """

    loss: float | None = None
    step: int = 0
    since: int = 0

    def improves(self, step: int, loss: float) -> bool:
        """Take note of a validation; returns whether its loss is the lowest."""
        if self.loss is None or loss < self.loss:
            self.loss, self.step, self.since = loss, step, 0
            return True
        self.since += 1
        return False
