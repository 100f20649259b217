"""Atomic files and folders (write to a temporary path, fsync, rename), file locks and disk-full errors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from mega_common.bounded_parsing import explain_read_error
from mega_common.errors import ConfigError, MegaError
from mega_common.progress_logging import logger

HINT = "free space there or choose another folder, and run the same command again; finished parts are kept"
_CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Libraries in Rust and C++ raise other exceptions, with the text of the system error.
_TEXT = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|StorageFull|QuotaExceeded|\d+ requested and \d+ written"
)


class DiskFullError(MegaError):
    """Error for a file that does not fit on its disk: a full disk, a quota or a limit on file size."""


def iterate_error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and all exceptions linked to it by `__cause__` and `__context__`."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def convert_full_disk_error(error: BaseException, place: Path | str | None = None) -> DiskFullError | None:
    """Return a `DiskFullError` that names the file if `error` was caused by a full disk, else None.
    It names `place` if the error names no file.

    Args:
        error: the raised error.
        place: the file or folder that was written, for an error without a file name.
    """
    cause = next((link for link in iterate_error_chain(error) if _is_disk_full(link)), None)
    if cause is None:
        return None
    names = [link.filename2 or link.filename for link in iterate_error_chain(error) if isinstance(link, OSError)]
    path = next(filter(None, names), None) or place or "the output"
    match = _TEXT.search(_error_text(cause))
    reason = (
        cause.strerror if isinstance(cause, OSError) and cause.strerror else match[0] if match else "the disk is full"
    )
    return DiskFullError(f"{path}: cannot be written ({reason})", hint=HINT)


def describe_disk_error(error: OSError, full: str = HINT) -> tuple[str, str | None]:
    """Return (message, hint) for an OSError that names a file; the hint is `full` for a full disk, else None."""
    hint = full if convert_full_disk_error(error) else None
    return f"{error.filename2 or error.filename}: {explain_read_error(error)}", hint


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _CODES
    return not isinstance(error, MegaError) and _TEXT.search(_error_text(error)) is not None


def _error_text(error: BaseException) -> str:
    """Return the text of an error; `str` omits it for an OSError without a number that has a file name."""
    return " ".join(str(arg) for arg in error.args)


def fsync_directory(folder: Path) -> None:
    """Flush the entries of directory `folder` to disk: a rename in it survives a power loss only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with add_path_to_errors(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Context manager that gives an OSError without a file name the name `path`, as for writes to an open file."""
    try:
        yield
    except Exception as error:
        for link in iterate_error_chain(error):  # a library may raise another error while it handles this one
            if isinstance(link, OSError):
                link.filename = link.filename or str(path)
        raise


def lock_folder(folder: Path) -> contextlib.AbstractContextManager[int]:
    """Context manager that locks `<folder>/.lock` exclusively and yields its file descriptor; an error if it is locked.

    Raises:
        ConfigError: naming the process that has the lock.
    """
    hint = "wait until it ends, stop it, or write to another folder"
    return lock_file_exclusively(
        folder / ".lock", lambda holder: ConfigError(f"{folder}: is in use by {holder}", hint=hint)
    )


@contextlib.contextmanager
def lock_file_exclusively(path: Path, make_error: Callable[[str], MegaError]) -> Iterator[int]:
    """Context manager that holds an exclusive flock on a file and yields its descriptor; raises `make_error(holder)` if taken.
    The file `path` names this process as the holder.

    A child that inherits the descriptor keeps the lock; the system releases it when the last process ends. On NFS it
    works across machines. On a file system without locks, a warning is logged and the block runs.

    Raises:
        MegaError: the result of `make_error` for the process that has the lock.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise make_error(os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            logger.warning(
                "%s: the file system does not support locks (%s); do not start another process in this folder",
                path.parent,
                error.strerror,
            )
        os.truncate(descriptor, 0)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_atomic_file(path: Path, *, text: bool = False) -> Iterator[IO[Any]]:
    """Context manager that yields a temporary file to write, which replaces `path` on success.
    The temporary file is next to `path`.

    After an error or a kill, `path` is unchanged. The temporary name begins with a dot and ends in `.tmp`, so that no
    reader matches it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with (
            add_path_to_errors(path),
            open(temporary, "w" if text else "wb", encoding="utf-8" if text else None) as stream,
        ):
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        fsync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def create_atomic_folder(path: Path) -> Iterator[Path]:
    """Context manager that yields a temporary folder to fill, which replaces `path` on success.
    The temporary folder is next to `path`.

    An existing `path` is moved aside first and deleted last. After an error, or a kill in the block, `path` is
    unchanged. The caller must make the files in the temporary folder durable; the folder entries are made so here.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        rename_folder_into_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def rename_folder_into_place(temporary: Path, path: Path) -> None:
    """Rename a temporary folder, whose files are already durable, to its final path; replace an existing one.
    The folder `temporary` is on the same disk as `path`.

    An existing `path` is moved aside first and deleted last; after an error it gets its name back.
    """
    for above, _, _ in os.walk(temporary):
        fsync_directory(Path(above))
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    if path.exists():
        os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except OSError:
        if aside.exists():
            os.rename(aside, path)
        raise
    fsync_directory(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def write_json_atomically(path: Path, value: object) -> None:
    """Write `value` as indented JSON to file `path` by an atomic rename.
    Raises ValueError for NaN and infinities, which JSON lacks.
    """
    with open_atomic_file(path, text=True) as stream:
        json.dump(value, stream, indent=1, allow_nan=False)
        stream.write("\n")


def compute_file_sha256(path: Path, *, chunk: int = 1 << 22, advance: Callable[[int], None] | None = None) -> str:
    """Return the hex SHA-256 of a whole file.
    It is read in blocks of `chunk` bytes; `advance` is called with the number of bytes of each block.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(chunk):
            digest.update(block)
            if advance is not None:
                advance(len(block))
    return digest.hexdigest()
