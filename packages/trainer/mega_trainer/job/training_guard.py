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

MEMORY = 0.98  # decay of the running average of the loss: about the last fifty steps
WARM = 50  # steps before a loss can be a spike
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # Slurm sends SIGUSR1 before a time limit
KEYBOARD_STATUS = 130  # exit status of a shell command ended by Ctrl-C
AGAIN_SECONDS = 2.0  # an earlier Ctrl-C is the first one, passed on by a launcher


@dataclass
class LossGuard:
    """Guard that applies the run's policies for non-finite losses and loss spikes to each step. `average` and `seen`
    are saved in checkpoints.
    """

    config: TrainConfig
    average: float = 0.0
    seen: int = 0
    skips: int = 0

    def is_loss_spike(self, loss: float) -> bool:
        """Return whether a loss is a spike: over `spike_factor` times the running average of the loss, once that
        includes `WARM` steps.
        """
        factor = self.config.spike_factor
        return bool(factor) and self.seen >= WARM and loss > factor * self.average

    def accepts_loss(self, loss: float) -> bool:
        """Return whether the weights may be updated by a step with this loss: always under the policy `warn`, else
        unless the loss is a spike. Loss and result are equal on all ranks.
        """
        return self.config.on_spike == "warn" or not self.is_loss_spike(loss)

    def check_step(self, step: int, result: StepResult, samples: str = "no samples") -> None:
        """Check the loss and the gradient norm of a finished step, and log, skip, stop or request a rollback by the
        run's policies; `samples` names the samples that the step read.

        Raises:
            NumericalError: when the policy is to stop. The weights are those of the last good step.
            RollbackRequested: when the policy is to roll back.
        """
        if result.overflowed:
            logger.info(
                "step %d: gradient overflows fp16 at loss scale %g; the weights were not updated",
                step,
                result.loss_scale,
            )
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
        hint = f"set train.{key}=skip or train.{key}=rollback to continue after single bad batches"
        if policy == "skip":
            self.skips += 1
            if self.skips < self.config.max_skips:
                logger.warning(message)
                return
            message = f"{message}, {self.skips} times in a row (train.max_skips)"
            hint = "resume from an earlier checkpoint with checkpoint.load"
        raise NumericalError(message, hint=f"lower optimizer.lr, use a higher precision, or {hint}")


def exit_immediately() -> None:
    """End this process without waiting for anything, such as a background save; unfinished files are removed by a later
    start.
    """
    print("interrupted: the steps since the last save are lost", file=sys.stderr, flush=True)
    os._exit(KEYBOARD_STATUS)


class StopSignalHandler:
    """Context manager that catches the signals which ask a run to end (SIGTERM, Ctrl-C and the like), so that the run
    saves once and then ends.

    Only the first signal counts, because schedulers signal both the launcher and its ranks, and launchers pass signals on.
    Ctrl-C ends the process at once from `AGAIN_SECONDS` after the first signal. Signals that are ignored from the start, such
    as SIGHUP under nohup, stay ignored.

    Args:
        pass_on: called with the number of the first signal.
        again: called to end the process at once.

    Attributes:
        name: of the first signal; None before it.
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
