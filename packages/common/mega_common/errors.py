"""Errors that a user can meet, all derived from `MegaError`.

Every `MegaError` prints as one readable message. `exit_status` follows the convention of the command line: 2 for a
mistake of the user's, 1 for a failure of ours (or of the machine's), 75 for training that was saved before its end.
"""

from __future__ import annotations

from typing import ClassVar

INTERRUPTED_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command, given again, goes on


class MegaError(Exception):
    """Base of all user-facing errors: a sentence that names the problem, and optionally a fix."""

    exit_status: ClassVar[int] = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (workers, ranks); keyword-only arguments do not survive the default pickling.
        return _rebuild_error, (type(self), self.message, self.hint)


def _rebuild_error(kind: type[MegaError], message: str, hint: str | None) -> MegaError:
    error = kind.__new__(kind)
    MegaError.__init__(error, message, hint=hint)
    return error


class ConfigError(MegaError):
    """A configuration that cannot be used: unknown keys, bad values or conflicting rules."""


class DataError(MegaError):
    """An input text, token file or tokenizer that cannot be used."""


class CheckpointError(MegaError):
    """A checkpoint that is missing, incomplete, corrupt, of another format or of another model."""


class NoCheckpointError(CheckpointError):
    """A path that certainly holds no checkpoint (not one that cannot be read)."""


class MissingPackageError(MegaError):
    """A package or extra that a command needs and that is not installed."""


class TrainingError(MegaError):
    """Training that cannot continue: a loss that is not finite, a lost rank, a device out of memory."""

    exit_status: ClassVar[int] = 1


class NumericalError(TrainingError):
    """Numerical failure by the run's own policy; a restart would reproduce it."""


class TrainingInterrupted(MegaError):
    """Training that was stopped before its last step (by a signal or a limit of time or steps) and has saved a
    checkpoint.
    """

    exit_status: ClassVar[int] = INTERRUPTED_STATUS


class TrainingTerminated(TrainingInterrupted):
    """Training that was stopped by SIGTERM and has saved; launchers send it to restart with another number of ranks."""
