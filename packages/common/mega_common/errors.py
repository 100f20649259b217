"""User-facing errors, all derived from `MegaError`.

Every `MegaError` prints as one readable message. `exit_status` is the status of the command: 2 for a user error, 1 for
an internal or machine failure, 75 for training that was saved before its last step.
"""

from __future__ import annotations

from typing import ClassVar

INTERRUPTED_STATUS = 75  # EX_TEMPFAIL of sysexits.h: running the same command again resumes


class MegaError(Exception):
    """Base of all user-facing errors: a message that names the problem, and optionally a hint how to fix it."""

    exit_status: ClassVar[int] = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are sent between processes (workers, ranks); the default pickling loses keyword-only arguments.
        return _rebuild_error, (type(self), self.message, self.hint)


def _rebuild_error(kind: type[MegaError], message: str, hint: str | None) -> MegaError:
    error = kind.__new__(kind)
    MegaError.__init__(error, message, hint=hint)
    return error


class ConfigError(MegaError):
    """Error for a configuration that cannot be used: unknown keys, bad values or conflicting rules."""


class DataError(MegaError):
    """Error for an input text, token file or tokenizer that cannot be used."""


class CheckpointError(MegaError):
    """Error for a checkpoint that is missing, incomplete, corrupt, in another format or from another model."""


class NoCheckpointError(CheckpointError):
    """Error for a readable path without a checkpoint, as opposed to a path that cannot be read."""


class MissingPackageError(MegaError):
    """Error for a Python package or extra that a command needs and that is not installed."""


class TrainingError(MegaError):
    """Error for training that cannot continue: a loss that is not finite, a lost rank, a device out of memory."""

    exit_status: ClassVar[int] = 1


class NumericalError(TrainingError):
    """Training error raised by the run's own policy for non-finite losses or gradients and for loss spikes.
    A restart would reproduce it.
    """


class TrainingInterrupted(MegaError):
    """Error for training that stopped before its last step, after it saved a checkpoint.
    It was stopped by a signal or a limit of time or steps.
    """

    exit_status: ClassVar[int] = INTERRUPTED_STATUS


class TrainingTerminated(TrainingInterrupted):
    """Error for training that was stopped by SIGTERM after it saved a checkpoint.
    Launchers send SIGTERM to restart with another number of ranks.
    """
