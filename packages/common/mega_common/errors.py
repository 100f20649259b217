"""The errors a user can meet, as one family.

Every `MegaError` prints as one readable message. `exit_status` follows the convention of the command line: 2 for a
mistake of the user's, 1 for a failure of ours (or of the machine's), 75 for training that was saved before its end.
"""

from __future__ import annotations

from typing import ClassVar

INTERRUPTED_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command, given again, goes on


class MegaError(Exception):
    """Base of the family: a sentence that names what is wrong, and optionally a way out."""

    exit_status: ClassVar[int] = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (workers, ranks); keyword-only arguments do not survive the default pickling.
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(kind: type[MegaError], message: str, hint: str | None) -> MegaError:
    error = kind.__new__(kind)
    MegaError.__init__(error, message, hint=hint)
    return error


class ConfigError(MegaError):
    """A configuration that cannot be used: unknown keys, bad values, rules that contradict."""


class DataError(MegaError):
    """An input text, token file or tokenizer that cannot be used."""


class CheckpointError(MegaError):
    """A checkpoint that is missing, incomplete, corrupt, foreign or of another model."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint at a place: certainly none, not one that cannot be read."""


class MissingPackageError(MegaError):
    """A command needs a package or an extra that is not installed."""


class TrainingError(MegaError):
    """Training cannot go on: a loss that is not a number, a lost rank, a device out of memory."""

    exit_status: ClassVar[int] = 1


class NumbersError(TrainingError):
    """Numbers that go wrong, as a run's own policy judges them; a new start would make the same."""


class Interrupted(MegaError):
    """Training that was asked to end before its last step (a signal, a limit of time or steps), and has saved."""

    exit_status: ClassVar[int] = INTERRUPTED_STATUS


class Terminated(Interrupted):
    """The same, asked by SIGTERM: as launchers end ranks that they start again in another number."""
