"""Guards of training: non-finite numbers, loss spikes, and signals that ask to stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from mega_common.errors import NumericalError
from mega_common.progress_logging import logger
from mega_trainer.config.sections import TrainConfig
from mega_trainer.job.rollback import RollbackRequested
from mega_trainer.job.step_result import StepResult

MEMORY = 0.98  # weight of the past in the running average of the loss: about the last fifty steps
WARM = 50  # steps before a jump of the loss means anything
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # the last is Slurm's, ahead of a limit
KEYBOARD_STATUS = 130  # what shells know as ended from the keyboard
AGAIN_SECONDS = 2.0  # a Ctrl-C after that is meant, and not the first one arriving once more


@dataclass
class LossGuard:
    """Applies the run's policy to each step's numbers. `average` and `seen` are part of what a checkpoint saves."""

    config: TrainConfig
    average: float = 0.0
    seen: int = 0
    skips: int = 0

    def is_loss_spike(self, loss: float) -> bool:
        """Return whether a loss is a spike: over `spike_factor` times the running average, once that includes `WARM`
        steps.
        """
        factor = self.config.spike_factor
        return bool(factor) and self.seen >= WARM and loss > factor * self.average

    def accepts_loss(self, loss: float) -> bool:
        """Return whether the weights may be updated by a step of that loss. The loss and the answer are equal on all
        ranks.
        """
        return self.config.on_spike == "warn" or not self.is_loss_spike(loss)

    def check_step(self, step: int, result: StepResult, samples: str = "no samples") -> None:
        """Check the numbers of a finished step; `samples` names the samples it read.

        Raises:
            NumbersError: when the policy says stop. The weights are those of the last good step.
            RollBack: when it says so.
        """
        if result.overflowed:
            logger.info("step %d: gradient too large for fp16 at loss scale %g, not updated", step, result.loss_scale)
            return
        if not result.is_finite:
            numbers = f"loss {result.loss} with gradient norm {result.grad_norm}"
            self._apply_policy(self.config.on_nan, "on_nan", step, f"step {step}: {numbers}, {samples}")
            return
        if self.is_loss_spike(result.loss):
            rule = f"over {self.config.spike_factor:g} times its average {self.average:.4f}"
            message = f"step {step}: loss {result.loss:.4f} is {rule}, {samples}"
            self._apply_policy(self.config.on_spike, "on_spike", step, message)
            if not result.updated:
                return
        self.skips = 0
        weight = MEMORY if self.seen >= WARM else self.seen / (self.seen + 1)
        self.average = weight * self.average + (1 - weight) * result.loss
        self.seen += 1

    def _apply_policy(self, policy: str, key: str, step: int, message: str) -> None:
        if policy == "warn":
            logger.warning(message)
            return
        message += "; the weights were not updated"
        if policy == "rollback":
            raise RollbackRequested(step, message)
        way = f"set train.{key}=skip to go past single bad batches, or rollback"
        if policy == "skip":
            self.skips += 1
            if self.skips < self.config.max_skips:
                logger.warning(message)
                return
            message = f"{message}, {self.skips} times in a row (train.max_skips)"
            way = "go on from an earlier checkpoint: checkpoint.load"
        raise NumericalError(message, hint=f"lower optimizer.lr, raise precision, or {way}")


def exit_immediately() -> None:
    """End this process without waiting for anything, such as a thread that saves; unfinished files are removed later."""
    print("interrupted: the steps since the last save are lost", file=sys.stderr, flush=True)
    os._exit(KEYBOARD_STATUS)


class StopSignalHandler:
    """Catches the signals that ask a run to end: the run saves once, whoever else gets the signal and passes it on.

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
        self, pass_on: Callable[[int], object] = lambda number: None, again: Callable[[], object] = exit_immediately
    ) -> None:
        self.name: str | None = None
        self._pass_on, self._again, self._since = pass_on, again, 0.0
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def __enter__(self) -> StopSignalHandler:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if handler == signal.SIG_IGN else self._handle_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
            self._pass_on(number)
        elif number == signal.SIGINT and time.monotonic() - self._since >= AGAIN_SECONDS:
            self._again()
