"""Events that end a run, skip a step or roll back: non-finite numbers, loss spikes, signals, limits, early stopping. No torch.

A rollback returns to an earlier checkpoint and skips the samples read since, as in PaLM's training after loss spikes
(arXiv:2204.02311, section 5.1). Skipped ranges are part of the saved state, so that a resumed or replayed run reads the same
samples.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_common.errors import NumericalError
from mega_common.progress_logging import logger
from mega_data.batch_loader import LoadableDataset
from mega_data.kinds.dataset_kind import TrainingSample
from mega_data.kinds.t5_samples import T5Sample
from mega_trainer.config.sections import TrainConfig
from mega_trainer.job.step_result import StepResult


class RollbackRequested(Exception):
    """Exception that requests a return to an earlier checkpoint after a bad step. Raised on all ranks.

    Attributes:
        step: of the bad numbers.
        message: description of the problem.
    """

    def __init__(self, step: int, message: str) -> None:
        super().__init__(message)
        self.step, self.message = step, message


@dataclass(frozen=True)
class SkippedSampleRanges:
    """Ranges of samples that a run skips after rollbacks.
    For each range, it has the samples consumed before it, and the number of samples skipped.

    >>> [SkippedSampleRanges(((4, 2),)).data_position(k) for k in (0, 3, 4, 5)]
    [0, 3, 6, 7]
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_checkpoint_state(cls, saved: Mapping[str, Any]) -> SkippedSampleRanges:
        """Return the skipped ranges in the saved state of a checkpoint."""
        return cls(tuple((at, count) for at, count in saved.get("left_out", ())))

    def data_position(self, consumed: int) -> int:
        """Return the position in the data order of the sample that is read after `consumed` samples.
        The position includes skipped samples.
        """
        return consumed + sum(count for at, count in self.ranges if at <= consumed)

    def skip_to_position(self, position: int, consumed: int) -> SkippedSampleRanges:
        """Return the skipped ranges extended by one that reaches up to a position in the data order.
        The new range skips all samples from the position after `consumed` samples up to `position`.
        """
        return SkippedSampleRanges((*self.ranges, (consumed, position - self.data_position(consumed))))

    def format_sample_positions(self, consumed: int, count: int) -> str:
        """Return a text that names the positions in the data order of the next `count` samples.
        They are the samples after `consumed` samples.
        """
        return f"samples {self.data_position(consumed)} to {self.data_position(consumed + count - 1)}"


@dataclass(frozen=True)
class SampleSkippingDataset(LoadableDataset):
    """View of a data set without the skipped ranges of samples."""

    dataset: LoadableDataset
    skipped_ranges: SkippedSampleRanges

    def __getitem__(self, k: int, /) -> TrainingSample | T5Sample:
        return self.dataset[self.skipped_ranges.data_position(k)]

    def estimate_attention_work(self, numbers: Sequence[int], /) -> npt.NDArray[np.int64]:
        """Return the approximate number of attended (query, key) token pairs of each sample, int64 [len(numbers)].
        `numbers` are the numbers of the samples, counted without skipped samples.
        """
        return self.dataset.estimate_attention_work([self.skipped_ranges.data_position(k) for k in numbers])


MEMORY = 0.98  # decay of the running average of the loss: about the last fifty steps
WARM = 50  # steps before a loss can be a spike
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)  # Slurm sends SIGUSR1 before a time limit
KEYBOARD_STATUS = 130  # exit status of a shell command ended by Ctrl-C
AGAIN_SECONDS = 2.0  # an earlier Ctrl-C is the first one, passed on by a launcher


@dataclass
class LossGuard:
    """Guard that applies the run's policies for non-finite losses and loss spikes to each step.
    Checkpoints save its running average of the loss (`average`) and the number of steps in it (`seen`).
    """

    config: TrainConfig
    average: float = 0.0
    seen: int = 0
    skips: int = 0

    def is_loss_spike(self, loss: float) -> bool:
        """Return whether a loss is over `spike_factor` times its running average, once that has `WARM` steps."""
        factor = self.config.spike_factor
        return bool(factor) and self.seen >= WARM and loss > factor * self.average

    def accepts_loss(self, loss: float) -> bool:
        """Return whether a step with this loss may update the weights: under policy `warn`, or if it is no spike.
        Loss and result are equal on all ranks.
        """
        return self.config.on_spike == "warn" or not self.is_loss_spike(loss)

    def check_loss_and_grad_norm(self, step: int, result: StepResult, samples: str = "no samples") -> None:
        """Check a finished step's loss and gradient norm; by policy log a problem, skip, stop or request a rollback.
        `samples` names the samples that the step read.

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
    """End this process at once with exit status 130, without waiting for anything such as a background save.
    A later start removes unfinished files.
    """
    print("interrupted: the steps since the last save are lost", file=sys.stderr, flush=True)
    os._exit(KEYBOARD_STATUS)


class StopSignalHandler:
    """Context manager that catches the signals which ask a run to end, so that the run saves once and then ends.
    The signals are SIGTERM, Ctrl-C and the like.

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


class RunLimits:
    """Limits in minutes and steps after which a run stops early.
    They are `train.exit_after_minutes`, counted from construction, and `train.exit_interval`, in steps.
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
