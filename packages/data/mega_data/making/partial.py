"""The folder in which a data set is made: held by one process, and gone when the files have their names."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mega_common.errors import DataError
from mega_common.files import fsync_folder
from mega_common.full_disk import HINT, full_disk

LOCK = "lock"


@contextlib.contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Turn what a disk raises while `path` is written into one sentence."""
    try:
        yield
    except OSError as error:
        hint = HINT if full_disk(error) else None
        raise DataError(f"{path}: cannot be written ({error.strerror or error})", hint=hint) from error


def partial_folder(prefix: Path) -> Path:
    """Where a data set is while it is written: `.NAME.partial`."""
    return prefix.with_name(f".{prefix.name}.partial")


def hold(folder: Path, *, wait: bool) -> int | None:
    """Make a folder and lock it for this process, which may also remove it; the lock's descriptor.

    None when another process holds it and it is not to be waited for.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # its holder has just removed it
            continue
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK)):
                return descriptor
        os.close(descriptor)
        if not wait:
            return None


def discard(folder: Path, last: Sequence[str] = ()) -> None:
    """Remove a folder that this process holds, the files named in `last` after the others and the lock after all."""
    with contextlib.suppress(OSError):
        names = sorted((path.name for path in folder.iterdir()), key=lambda name: (name == LOCK, name in last))
        for name in names:
            (folder / name).unlink()
        folder.rmdir()


def give_names(folder: Path, names: Mapping[str, Path]) -> None:
    """Rename the files of `folder`, those of them that are there, durably one after another."""
    for name, final in names.items():
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder / name, final)
            fsync_folder(final.parent)
