"""What happens when training goes wrong: numbers that are not finite, losses that jump, signals that ask to stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from mega_common.errors import TrainingError
from mega_common.log import logger
from mega_trainer.sections import TrainConfig
from mega_trainer.step import StepResult

MEMORY = 0.98  # weight of the past in the running average of the loss: about the last fifty steps
WARM = 50  # steps before a jump of the loss means anything
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # the last is Slurm's, ahead of a limit
KEYBOARD_STATUS = 130  # what shells know as ended from the keyboard
AGAIN_SECONDS = 2.0  # a Ctrl-C after that is meant, and not the first one arriving once more


@dataclass
class Guard:
    """Applies the run's policy to each step's numbers. `average` and `seen` are part of what a checkpoint saves."""

    config: TrainConfig
    average: float = 0.0
    seen: int = 0
    skips: int = 0

    def check(self, step: int, result: StepResult) -> None:
        """Look at a finished step.

        Raises:
            TrainingError: when the policy says stop. The weights are those of the last good step.
        """
        if result.overflowed:
            logger.info("step %d: gradient too large for fp16 at loss scale %g, not updated", step, result.loss_scale)
            return
        if not result.updated:
            self._not_finite(step, result)
            return
        self.skips = 0
        factor = self.config.spike_factor
        if factor and self.seen >= WARM and result.loss > factor * self.average:
            message = f"step {step}: loss {result.loss:.4f} is over {factor:g} times its average {self.average:.4f}"
            if self.config.on_spike == "stop":
                raise TrainingError(message, hint="train.on_spike is 'stop'; go on from an earlier checkpoint")
            logger.warning(message)
        weight = MEMORY if self.seen >= WARM else self.seen / (self.seen + 1)
        self.average = weight * self.average + (1 - weight) * result.loss
        self.seen += 1

    def _not_finite(self, step: int, result: StepResult) -> None:
        self.skips += 1
        message = f"step {step}: loss {result.loss} with gradient norm {result.grad_norm}, the weights were not updated"
        if self.config.on_nan == "stop" or self.skips >= self.config.max_skips:
            if self.config.on_nan == "stop":
                way = "or set train.on_nan=skip to go past single bad batches"
            else:
                message = f"{message}, {self.skips} times in a row (train.max_skips)"
                way = "or go on from an earlier checkpoint: checkpoint.load"
            raise TrainingError(message, hint=f"lower optimizer.lr, raise precision, {way}")
        logger.warning(message)


def leave() -> None:
    """End this process without waiting for anything, such as a thread that saves; what that leaves is swept later."""
    print("interrupted: the steps since the last save are lost", file=sys.stderr, flush=True)
    os._exit(KEYBOARD_STATUS)


class StopSignal:
    """Catches the signals that ask a run to end: it saves once, whoever else got the signal and passes it on.

    All but the first are heard no more, for schedulers signal launcher and ranks alike, and launchers their ranks once
    more. Only Ctrl-C, `AGAIN_SECONDS` or more after the first signal, ends at once. What is ignored from the start, as
    SIGHUP under nohup, stays so.

    Args:
        pass_on: is told the number of the first signal.
        again: what ends the process at once.

    Attributes:
        name: of the first signal, when there was one.
    """

    def __init__(
        self, pass_on: Callable[[int], object] = lambda number: None, again: Callable[[], object] = leave
    ) -> None:
        self.name: str | None = None
        self._pass_on, self._again, self._since = pass_on, again, 0.0
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def __enter__(self) -> StopSignal:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if handler == signal.SIG_IGN else self._caught)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
            self._pass_on(number)
        elif number == signal.SIGINT and time.monotonic() - self._since >= AGAIN_SECONDS:
            self._again()
