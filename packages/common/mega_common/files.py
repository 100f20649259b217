"""Files that are either whole or absent: write beside, fsync, rename, fsync the folder. And locks on folders."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from mega_common.errors import ConfigError, MegaError
from mega_common.full_disk import chain
from mega_common.log import logger


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a rename survives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add `path` to an OSError without a file name, which is what writing to an open file raises, on a full disk say."""
    try:
        yield
    except Exception as error:
        for one in chain(error):  # libraries raise others while they handle it
            if isinstance(one, OSError):
                one.filename = one.filename or str(path)
        raise


def locked(folder: Path) -> contextlib.AbstractContextManager[int]:
    """Hold `<folder>/.lock` while the block runs, as `locked_file` does.

    Raises:
        ConfigError: when another process holds it, naming that.
    """
    hint = "wait for its end or end it, or write to another folder"
    return locked_file(folder / ".lock", lambda holder: ConfigError(f"{folder} is in use by {holder}", hint=hint))


@contextlib.contextmanager
def locked_file(path: Path, taken: Callable[[str], MegaError]) -> Iterator[int]:
    """Hold a lock file, which names its holder, while the block runs, and give its descriptor.

    A child that inherits the descriptor goes on holding it; the system frees it when the last of them dies. On NFS it
    holds between machines. Where the file system has no locks, a warning says so and the block runs.

    Raises:
        MegaError: what `taken` makes of the name of another holder.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise taken(os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process") from None
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
def atomic_file(path: Path, *, text: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary neighbour of `path` for writing; on leaving without an error it becomes `path`.

    After an error, or a kill, `path` is what it was before. The temporary name begins with a dot and ends in `.tmp`,
    so that no reader takes it for the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}.tmp"
    try:
        with naming(path), open(temporary, "w" if text else "wb", encoding="utf-8" if text else None) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make a temporary neighbour of `path` to fill; on leaving without an error it becomes `path`.

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
    """Rename a folder, whose files are durable, to `path` on the same disk.

    A folder that is `path` already goes aside first and is deleted last; after an error it has its name again.
    """
    for above, _, _ in os.walk(temporary):
        fsync_folder(Path(above))
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    if path.exists():
        os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except OSError:
        if aside.exists():
            os.rename(aside, path)
        raise
    fsync_folder(path.parent)
    shutil.rmtree(aside, ignore_errors=True)


def write_json(path: Path, value: object) -> None:
    """Write `value` atomically as indented JSON. NaN and infinities are refused: they are not JSON."""
    with atomic_file(path, text=True) as stream:
        json.dump(value, stream, indent=1, allow_nan=False)
        stream.write("\n")


def sha256_file(path: Path, *, chunk: int = 1 << 22, advance: Callable[[int], None] | None = None) -> str:
    """Hex SHA-256 of a whole file, read in pieces of `chunk` bytes; `advance` is told the bytes of each."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(chunk):
            digest.update(block)
            if advance is not None:
                advance(len(block))
    return digest.hexdigest()
