"""Folder in which a data set is written: locked by one process, and removed after its files are renamed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mega_common.atomic_files import HINT, convert_full_disk_error, fsync_directory
from mega_common.errors import DataError
from mega_common.progress_logging import logger

LOCK = "lock"


@contextlib.contextmanager
def convert_write_errors_to_data_error(path: Path) -> Iterator[None]:
    """Context manager that converts OS errors of code that writes `path` to a one-sentence DataError.
    The error has a hint if the disk is full.
    """
    try:
        yield
    except OSError as error:
        hint = HINT if convert_full_disk_error(error) else None
        raise DataError(f"{path}: cannot be written ({error.strerror or error})", hint=hint) from error


def get_partial_folder(prefix: Path) -> Path:
    """Return the folder `.NAME.partial` next to a data set, which has its files while they are written."""
    return prefix.with_name(f".{prefix.name}.partial")


def lock_partial_folder(folder: Path, *, wait: bool) -> int | None:
    """Create and lock a folder of partial files; return the lock's descriptor, or None if another process has the lock.
    With `wait`, it waits for the other process.

    Returns None if another process has the lock and `wait` is false.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the previous owner has just removed it
            continue
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK)):
                return descriptor
        os.close(descriptor)
        if not wait:
            return None


@contextlib.contextmanager
def hold_partial_folder(folder: Path, notice: str = "") -> Iterator[None]:
    """Context manager that waits for a partial folder's lock, and removes the folder after a block that raises no error.
    If another process has the lock, it logs `notice`, if any.
    """
    lock = lock_partial_folder(folder, wait=not notice)
    if lock is None:
        logger.info("%s", notice)
        lock = lock_partial_folder(folder, wait=True)
    assert lock is not None
    try:
        yield
        remove_partial_folder(folder)
    finally:
        os.close(lock)


def remove_partial_folder(folder: Path, last: Sequence[str] = ()) -> None:
    """Remove a folder of unfinished files that this process has locked.
    First most files are removed, then those named in `last`, finally the lock. OS errors are ignored.
    """
    with contextlib.suppress(OSError):
        names = sorted((path.name for path in folder.iterdir()), key=lambda name: (name == LOCK, name in last))
        for name in names:
            (folder / name).unlink()
        folder.rmdir()


def move_files_durably(folder: Path, names: Mapping[str, Path]) -> None:
    """Move the files of `folder` that exist to their final paths in the order of `names`, each durably before the next.
    `names` maps a name in the folder to its final path.
    """
    for name, final in names.items():
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder / name, final)
            fsync_directory(final.parent)
