"""When a run is to end before its last step, because its own settings say so: a queue gives it so many minutes."""

from __future__ import annotations

import time
from collections.abc import Callable

from mega_trainer.sections import TrainConfig


class Limits:
    """`train.exit_after_minutes`, counted from here, and `train.exit_interval`."""

    def __init__(self, config: TrainConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock, self._begun = config, clock, clock()

    def reached(self, step: int) -> str | None:
        """Which of them a run that has done `step` steps has come to."""
        minutes, interval = self._config.exit_after_minutes, self._config.exit_interval
        if minutes is not None and self._clock() - self._begun >= 60 * minutes:
            return f"train.exit_after_minutes = {minutes:g}"
        if interval is not None and step % interval == 0:
            return f"train.exit_interval = {interval}"
        return None
