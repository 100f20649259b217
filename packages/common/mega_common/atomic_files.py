"""Atomic files and folders (write to a temporary path, fsync, rename, fsync the folder), file locks and full-disk
errors.
"""

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

from mega_common.errors import ConfigError, MegaError
from mega_common.progress_logging import logger

HINT = (
    "free space there, or choose another folder, and give the same command again: it goes on with what is finished, or "
    "starts again"
)
_CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Libraries in Rust and C++ raise errors of their own, with the text of the system's.
_TEXT = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|StorageFull|QuotaExceeded|\d+ requested and \d+ written"
)


class DiskFullError(MegaError):
    """A file that does not fit: a full disk, a quota or a limit on file size."""


def iterate_error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and all its causes and contexts."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def convert_full_disk_error(error: BaseException, place: Path | str | None = None) -> DiskFullError | None:
    """Return the error to report if `error` was caused by a full disk, else None.

    Args:
        error: what was raised.
        place: the file or folder that was written, where the error does not name it.
    """
    found = next((one for one in iterate_error_chain(error) if _is_disk_full(one)), None)
    if found is None:
        return None
    named = [one.filename2 or one.filename for one in iterate_error_chain(error) if isinstance(one, OSError)]
    where = next(filter(None, named), None) or place or "the output"
    reason = _TEXT.search(_error_text(found))
    said = (
        found.strerror if isinstance(found, OSError) and found.strerror else reason[0] if reason else "the disk is full"
    )
    return DiskFullError(f"{where}: cannot be written ({said})", hint=HINT)


def describe_disk_error(error: OSError, full: str = HINT) -> tuple[str, str | None]:
    """Return the sentence about an OSError that names a file, and `full` as its hint where the disk is full."""
    hint = full if convert_full_disk_error(error) else None
    return f"{error.filename2 or error.filename}: {error.strerror or error}", hint


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _CODES
    return not isinstance(error, MegaError) and _TEXT.search(_error_text(error)) is not None


def _error_text(error: BaseException) -> str:
    """Return the text of an error; `str` omits it for an OSError without a number that has a file name."""
    return " ".join(str(one) for one in error.args)


def fsync_directory(folder: Path) -> None:
    """Make the names in `folder` durable: a rename survives a power loss only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with add_path_to_errors(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Add `path` to an OSError without a file name, as raised by writes to an open file (for example on a full disk)."""
    try:
        yield
    except Exception as error:
        for one in iterate_error_chain(error):  # libraries raise others while they handle it
            if isinstance(one, OSError):
                one.filename = one.filename or str(path)
        raise


def lock_folder(folder: Path) -> contextlib.AbstractContextManager[int]:
    """Hold `<folder>/.lock` while the block runs, by `lock_file_exclusively`.

    Raises:
        ConfigError: when another process holds it, naming that.
    """
    hint = "wait for its end or end it, or write to another folder"
    return lock_file_exclusively(
        folder / ".lock", lambda holder: ConfigError(f"{folder} is in use by {holder}", hint=hint)
    )


@contextlib.contextmanager
def lock_file_exclusively(path: Path, make_error: Callable[[str], MegaError]) -> Iterator[int]:
    """Hold an exclusive lock on a file that names its holder while the block runs; yield the file descriptor.

    A child that inherits the descriptor goes on holding it; the system frees it when the last of them dies. On NFS it
    holds between machines. Where the file system has no locks, a warning says so and the block runs.

    Raises:
        MegaError: what `make_error` makes of the name of another holder.
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
            logger.warning("%s: no lock is possible there (%s): start nothing else in it", path.parent, error.strerror)
        os.truncate(descriptor, 0)
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_atomic_file(path: Path, *, text: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file beside `path` for writing; leaving the block without an error renames it to `path`.

    After an error, or a kill, `path` is what it was before. The temporary name begins with a dot and ends in `.tmp`,
    so that no reader takes it for the file.
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
    """Create a temporary folder beside `path` to fill; leaving the block without an error renames it to `path`.

    A folder that is `path` already goes aside first and is deleted last. After an error, or a kill while the temporary
    one is filled, `path` is what it was before. What is in the temporary folder must be durable itself; its names, and
    the new one, are made so here.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        install_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def install_folder(temporary: Path, path: Path) -> None:
    """Rename a folder, whose files are already durable, to `path` on the same disk.

    A folder that is `path` already goes aside first and is deleted last; after an error it has its name again.
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
    """Write `value` atomically as indented JSON. NaN and infinities are rejected, as JSON has none."""
    with open_atomic_file(path, text=True) as stream:
        json.dump(value, stream, indent=1, allow_nan=False)
        stream.write("\n")


def compute_file_sha256(path: Path, *, chunk: int = 1 << 22, advance: Callable[[int], None] | None = None) -> str:
    """Return the hex SHA-256 of a whole file, read in blocks of `chunk` bytes; `advance` is called with the bytes of
    each.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(chunk):
            digest.update(block)
            if advance is not None:
                advance(len(block))
    return digest.hexdigest()
