"""Where the bytes of a checkpoint are: files that are written once, and read by ranges.

One interface and two kinds of it: a file system here (fsync, mmap) and an object store (`remote`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

import torch
from torch import Tensor

from mega_common.errors import CheckpointError
from mega_common.files import fsync_folder, naming
from mega_common.remote import Place, Remote, in_words

AHEAD_BYTES = 2 << 20  # the kernel cuts what is asked for at once to a few megabytes
SENT_BYTES = 64 << 20


class NewBytes(Protocol):
    """A file in the making."""

    def write(self, block: memoryview) -> None:
        """Append."""

    def finish(self) -> None:
        """Make it durable and whole."""

    def release(self) -> None:
        """Let go of it; what is not finished is worth nothing."""


class Ranges(Protocol):
    """A file that was written before."""

    def size(self) -> int:
        """Its length in bytes."""

    def read(self, begin: int, end: int, *, whole: bool = False) -> Tensor:
        """Bytes [begin, end) as uint8. With `whole` all of them will be used."""


class Folder(Protocol):
    """A folder that holds files of a checkpoint, or is to. Names may lead into folders below."""

    def create(self, name: str) -> NewBytes:
        """Begin a file that is not there yet."""

    def open(self, name: str) -> Ranges:
        """Open a file, for as long as what is returned lives."""

    def size(self, name: str) -> int:
        """Length in bytes of a plain file.

        Raises:
            CheckpointError: for anything but a plain file (links, pipes); FileNotFoundError: where nothing is.
        """

    def look(self) -> None:
        """Prepare for being asked the sizes of many files, which are as they were then."""

    def names(self) -> list[str]:
        """All files, at any depth."""

    def stamps(self) -> dict[str, str]:
        """{name: what changes when the file does} of all files but hidden ones."""

    def made(self) -> contextlib.AbstractContextManager[None]:
        """Make the folder, to be filled in the block; the names in it are durable when that is left."""


class LocalFolder:
    """On a file system of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, name: str) -> NewBytes:
        """Never an existing file."""
        return _NewFile(self._path / name)

    def open(self, name: str) -> Ranges:
        """Mapped: what is not used is not read."""
        return _MappedFile(self._path / name)

    def size(self, name: str) -> int:
        """Looked at whenever it is asked."""
        return plain_size(self._path, name)

    def look(self) -> None:
        """Nothing: each file is looked at when it is asked for."""

    def names(self) -> list[str]:
        """Links and the like too."""
        return [path.relative_to(self._path).as_posix() for path in self._path.rglob("*") if not path.is_dir()]

    def stamps(self) -> dict[str, str]:
        """Length and time."""
        found = {name: (self._path / name).stat() for name in self.names() if _is_shown(name)}
        return {name: f"{one.st_size} bytes at {one.st_mtime_ns}" for name, one in found.items()}

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """With an fsync at the end."""
        os.mkdir(self._path)
        yield
        fsync_folder(self._path)


class RemoteFolder:
    """On an object store."""

    def __init__(self, path: Remote) -> None:
        self._path = path
        self._sizes: dict[str, int] | None = None

    def create(self, name: str) -> NewBytes:
        """In parts; the object appears with `finish`."""
        return _NewObject(self._path / name)

    def open(self, name: str) -> Ranges:
        """By range requests."""
        return _Object(self._path / name)

    def size(self, name: str) -> int:
        """As it was at the last `look`, or is now."""
        if self._sizes is None:
            return (self._path / name).size()
        if name not in self._sizes:
            raise FileNotFoundError(name)
        return self._sizes[name]

    def look(self) -> None:
        """One listing instead of a request for each file."""
        self._sizes = self._path.sizes()

    def names(self) -> list[str]:
        """All objects below."""
        return sorted(self._path.sizes())

    def stamps(self) -> dict[str, str]:
        """Length and whatever the store tells of when or what was put."""
        return {name: stamp for name, stamp in self._path.stamps().items() if _is_shown(name)}

    def made(self) -> contextlib.AbstractContextManager[None]:
        """Nothing is to be done: a folder is a part of a name."""
        return contextlib.nullcontext()


class _NewFile:
    """Written with an early hint to the disk, durable by fsync."""

    def __init__(self, path: Path) -> None:
        self._path, self._bytes, self._sent = path, 0, 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, block: memoryview) -> None:
        while block:
            with naming(self._path):
                written = os.write(self._descriptor, block)
            block = block[written:]
            self._bytes += written
        if self._bytes - self._sent >= SENT_BYTES:
            self._send()

    def _send(self) -> None:
        """Let the disk begin with what is written so far; `finish` then waits less, and no write is held up before it."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, self._sent, self._bytes - self._sent, os.POSIX_FADV_DONTNEED)
        self._sent = self._bytes

    def finish(self) -> None:
        with naming(self._path):
            os.fsync(self._descriptor)

    def release(self) -> None:
        os.close(self._descriptor)


class _MappedFile:
    def __init__(self, path: Path) -> None:
        # Open as long as this is: a checkpoint that is replaced or deleted meanwhile can still be read to its end.
        self._file = open(path, "rb")  # noqa: SIM115

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read(self, begin: int, end: int, *, whole: bool = False) -> Tensor:
        return mapped(self._file, begin, end, whole=whole)


class _NewObject:
    def __init__(self, place: Remote) -> None:
        self._place, self._stream = place, place.open_new()
        self._finished = False

    def write(self, block: memoryview) -> None:
        with in_words(self._place, writing=True):
            self._stream.write(block)

    def finish(self) -> None:
        with in_words(self._place, writing=True):
            self._stream.close()
        self._finished = True

    def release(self) -> None:
        # What fsspec has not discarded it would complete when it is collected.
        if not self._finished and hasattr(self._stream, "discard"):
            with contextlib.suppress(Exception):
                self._stream.discard()
                self._stream.closed = True  # type: ignore[misc]


class _Object:
    def __init__(self, place: Remote) -> None:
        self._place = place

    def size(self) -> int:
        return self._place.size()

    def read(self, begin: int, end: int, *, whole: bool = False) -> Tensor:
        if begin == end:
            return torch.empty(0, dtype=torch.uint8)
        data = bytearray(self._place.read_bytes(begin, end))  # of its own: torch wants memory that it may write to
        if len(data) != end - begin:
            raise CheckpointError(f"{self._place}: ends before byte {end}")
        return torch.frombuffer(data, dtype=torch.uint8)


def folder_at(path: Place) -> Folder:
    """The kind of folder that a path leads to."""
    return RemoteFolder(path) if isinstance(path, Remote) else LocalFolder(path)


def _is_shown(name: str) -> bool:
    return not any(part.startswith(".") for part in PurePosixPath(name).parts)


def plain_size(folder: Path, name: str) -> int:
    """Length in bytes of a plain file inside `folder`. Links, pipes and the like are refused, on the way to it too.

    Raises:
        CheckpointError: when it is none; FileNotFoundError: when there is no such file.
    """
    path = folder / name
    above = [folder / parent for parent in PurePosixPath(name).parents][:-1]
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or any(parent.is_symlink() for parent in above):
        raise CheckpointError(f"{path}: not a plain file inside the checkpoint (links are not followed)")
    return found.st_size


def mapped(file: IO[bytes], begin: int, end: int, *, whole: bool = False) -> Tensor:
    """Bytes [begin, end) of a file as a private mapping: read when they are used, given back with the tensor. uint8.

    With `whole`, all of them, and no others, are asked of the disk at once; else the kernel guesses what to read ahead.
    """
    if begin == end:
        return torch.empty(0, dtype=torch.uint8)
    before = begin % mmap.ALLOCATIONGRANULARITY
    # Copy-on-write: nothing can write to the file through it, yet torch has the writable memory that it wants.
    memory = mmap.mmap(file.fileno(), end - begin + before, access=mmap.ACCESS_COPY, offset=begin - before)
    if whole:
        for start in range(0, len(memory), AHEAD_BYTES):
            memory.madvise(mmap.MADV_WILLNEED, start, min(AHEAD_BYTES, len(memory) - start))
    return torch.frombuffer(memory, dtype=torch.uint8, offset=before)
