"""Conditions that end a run before its last step: time and step limits, and the lowest validation loss for early
stopping. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mega_trainer.config.sections import TrainConfig


class RunLimits:
    """Limits after which a run stops early: `train.exit_after_minutes`, counted from construction, and
    `train.exit_interval`, in steps.
    """

    def __init__(self, config: TrainConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock, self._begun = config, clock, clock()

    def reached_limit(self, step: int) -> str | None:
        """Return a text that names the limit that a run has reached after `step` steps, or None."""
        minutes, interval = self._config.exit_after_minutes, self._config.exit_interval
        if minutes is not None and self._clock() - self._begun >= 60 * minutes:
            return f"train.exit_after_minutes = {minutes:g}"
        if interval is not None and step % interval == 0:
            return f"train.exit_interval = {interval}"
        return None


@dataclass
class BestValidation:
    """Lowest validation loss of the run so far, and its step.

    Attributes:
        loss: None before the first validation.
        step: after which it was.
        since: validations after that.
    """

    loss: float | None = None
    step: int = 0
    since: int = 0

    def record_validation(self, step: int, loss: float) -> bool:
        """Record the validation loss after `step`; return whether it is the lowest so far."""
        if self.loss is None or loss < self.loss:
            self.loss, self.step, self.since = loss, step, 0
            return True
        self.since += 1
        return False
