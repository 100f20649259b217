"""Storage of checkpoint bytes: files that are written once and read by ranges, on a file system (fsync, mmap) or an
object store (`mega_common.object_store`).
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

from mega_common.atomic_files import add_path_to_errors, fsync_directory
from mega_common.errors import CheckpointError
from mega_common.object_store import Location, RemotePath, convert_object_store_errors

READ_AHEAD_BYTES = 2 << 20  # per request; the kernel limits requests to a few megabytes
WRITEBACK_BYTES = 64 << 20


class FileWriter(Protocol):
    """Interface of a new file that is being written."""

    def write_block(self, block: memoryview) -> None:
        """Append a block of bytes to the file."""

    def finish_file(self) -> None:
        """Make the written file durable and complete."""

    def release_file(self) -> None:
        """Release the resources of the file; an unfinished file is discarded."""


class RangeReader(Protocol):
    """Interface of an existing file of which byte ranges are read."""

    def file_size(self) -> int:
        """Return the length of the file in bytes."""

    def read_range(self, begin: int, end: int, *, whole: bool = False) -> Tensor:
        """Return bytes [begin, end) of the file as a uint8 tensor. `whole` is a hint that all of them will be used."""


class StorageFolder(Protocol):
    """Interface of a folder of checkpoint files, local or on an object store. Names may contain subfolders."""

    def create_file(self, name: str) -> FileWriter:
        """Create the file `name`, which must not exist, for writing."""

    def open_file(self, name: str) -> RangeReader:
        """Open the file `name` for reading, for as long as the returned reader lives."""

    def file_size(self, name: str) -> int:
        """Return the length in bytes of the regular file `name`.

        Raises:
            CheckpointError: for anything but a plain file (links, pipes); FileNotFoundError: for a missing file.
        """

    def cache_sizes(self) -> None:
        """Prepare for `file_size` queries of many files, which are then answered as of this call."""

    def list_files(self) -> list[str]:
        """Return the names of all files in the folder, at any depth."""

    def file_stamps(self) -> dict[str, str]:
        """Return {name: stamp} of all files except hidden ones; a stamp changes when its file does."""

    def create_folder(self) -> contextlib.AbstractContextManager[None]:
        """Context manager that creates the folder; the names of files in it are durable when the context exits."""


class LocalFolder:
    """Folder of checkpoint files on a file system of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create_file(self, name: str) -> FileWriter:
        """Create the file `name` for writing; an existing one is an error."""
        return _LocalFileWriter(self._path / name)

    def open_file(self, name: str) -> RangeReader:
        """Open a local file for reading as a memory map: only used bytes are read."""
        return _MappedFile(self._path / name)

    def file_size(self, name: str) -> int:
        """Return the current length in bytes of a regular file."""
        return regular_file_size(self._path, name)

    def cache_sizes(self) -> None:
        """Do nothing: a local file is looked up when its size is queried."""

    def list_files(self) -> list[str]:
        """Return the names of all files in a local folder, links included."""
        return [path.relative_to(self._path).as_posix() for path in self._path.rglob("*") if not path.is_dir()]

    def file_stamps(self) -> dict[str, str]:
        """Return {name: length and modification time} of each file except hidden ones."""
        found = {name: (self._path / name).stat() for name in self.list_files() if _is_visible(name)}
        return {name: f"{one.st_size} bytes at {one.st_mtime_ns}" for name, one in found.items()}

    @contextlib.contextmanager
    def create_folder(self) -> Iterator[None]:
        """Context manager that creates a local folder, and makes the names in it durable by fsync on exit."""
        os.mkdir(self._path)
        yield
        fsync_directory(self._path)


class RemoteFolder:
    """Folder of checkpoint files on an object store."""

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._sizes: dict[str, int] | None = None

    def create_file(self, name: str) -> FileWriter:
        """Create an object by multipart upload; it appears when `finish_file` is called."""
        return _RemoteObjectWriter(self._path / name)

    def open_file(self, name: str) -> RangeReader:
        """Open an object of the store for reading by range requests."""
        return _RemoteObject(self._path / name)

    def file_size(self, name: str) -> int:
        """Return the length in bytes of an object as of the last `cache_sizes`, else the current one.
        Raises FileNotFoundError for a name that `cache_sizes` did not list.
        """
        if self._sizes is None:
            return (self._path / name).get_object_size()
        if name not in self._sizes:
            raise FileNotFoundError(name)
        return self._sizes[name]

    def cache_sizes(self) -> None:
        """List the sizes of all objects at once, instead of in one request per `file_size` query."""
        self._sizes = self._path.list_object_sizes()

    def list_files(self) -> list[str]:
        """Return the names of all objects below the folder."""
        return sorted(self._path.list_object_sizes())

    def file_stamps(self) -> dict[str, str]:
        """Return {name: length and the store's version information} of each object except hidden ones."""
        return {name: stamp for name, stamp in self._path.list_object_versions().items() if _is_visible(name)}

    def create_folder(self) -> contextlib.AbstractContextManager[None]:
        """Context manager that does nothing: on an object store a folder is only a prefix of object names."""
        return contextlib.nullcontext()


class _LocalFileWriter:
    """Local file whose writeback starts early, durable by fsync."""

    def __init__(self, path: Path) -> None:
        self._path, self._bytes, self._sent = path, 0, 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write_block(self, block: memoryview) -> None:
        while block:
            with add_path_to_errors(self._path):
                written = os.write(self._descriptor, block)
            block = block[written:]
            self._bytes += written
        if self._bytes - self._sent >= WRITEBACK_BYTES:
            self._start_writeback()

    def _start_writeback(self) -> None:
        """Start writeback of the bytes written so far, so that `finish_file` waits less; no write blocks before it."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, self._sent, self._bytes - self._sent, os.POSIX_FADV_DONTNEED)
        self._sent = self._bytes

    def finish_file(self) -> None:
        with add_path_to_errors(self._path):
            os.fsync(self._descriptor)

    def release_file(self) -> None:
        os.close(self._descriptor)


class _MappedFile:
    def __init__(self, path: Path) -> None:
        # Kept open, so that a checkpoint that is replaced or deleted concurrently can still be read.
        self._file = open(path, "rb")  # noqa: SIM115

    def file_size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read_range(self, begin: int, end: int, *, whole: bool = False) -> Tensor:
        return mmap_file_range(self._file, begin, end, whole=whole)


class _RemoteObjectWriter:
    def __init__(self, path: RemotePath) -> None:
        self._path, self._stream = path, path.open_multipart_upload()
        self._finished = False

    def write_block(self, block: memoryview) -> None:
        with convert_object_store_errors(self._path, writing=True):
            self._stream.write(block)

    def finish_file(self) -> None:
        with convert_object_store_errors(self._path, writing=True):
            self._stream.close()
        self._finished = True

    def release_file(self) -> None:
        # fsspec completes an upload when the stream is garbage-collected, unless it is discarded.
        if not self._finished and hasattr(self._stream, "discard"):
            with contextlib.suppress(Exception):
                self._stream.discard()
                self._stream.closed = True  # type: ignore[misc]


class _RemoteObject:
    def __init__(self, path: RemotePath) -> None:
        self._path = path

    def file_size(self) -> int:
        return self._path.get_object_size()

    def read_range(self, begin: int, end: int, *, whole: bool = False) -> Tensor:
        if begin == end:
            return torch.empty(0, dtype=torch.uint8)
        data = bytearray(self._path.read_bytes(begin, end))  # a copy, since torch requires writable memory
        if len(data) != end - begin:
            raise CheckpointError(f"{self._path}: truncated: ends before byte {end}")
        return torch.frombuffer(data, dtype=torch.uint8)


def open_storage_folder(path: Location) -> StorageFolder:
    """Return the `StorageFolder` of a local path or an object store URL."""
    return RemoteFolder(path) if isinstance(path, RemotePath) else LocalFolder(path)


def _is_visible(name: str) -> bool:
    return not any(part.startswith(".") for part in PurePosixPath(name).parts)


def regular_file_size(folder: Path, name: str) -> int:
    """Return the length in bytes of the regular file `name` inside `folder`; a CheckpointError for links and special files.
    Links, pipes and so on are rejected, also as parent folders.

    Raises:
        CheckpointError: for a link, pipe or other special file; FileNotFoundError: for a missing file.
    """
    path = folder / name
    parents = [folder / parent for parent in PurePosixPath(name).parents][:-1]
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or any(parent.is_symlink() for parent in parents):
        raise CheckpointError(f"{path}: must be a plain file inside the checkpoint (links are not followed)")
    return found.st_size


def mmap_file_range(file: IO[bytes], begin: int, end: int, *, whole: bool = False) -> Tensor:
    """Return bytes [begin, end) of a file as a private memory map, uint8.

    Bytes are read when used and released with the tensor. With `whole`, a hint that all of them will be used, exactly
    these bytes are requested from the disk at once; else the kernel's read-ahead decides.
    """
    if begin == end:
        return torch.empty(0, dtype=torch.uint8)
    before = begin % mmap.ALLOCATIONGRANULARITY
    # Copy-on-write: torch requires writable memory, and the file cannot be changed through the mapping.
    memory = mmap.mmap(file.fileno(), end - begin + before, access=mmap.ACCESS_COPY, offset=begin - before)
    if whole:
        for start in range(0, len(memory), READ_AHEAD_BYTES):
            memory.madvise(mmap.MADV_WILLNEED, start, min(READ_AHEAD_BYTES, len(memory) - start))
    return torch.frombuffer(memory, dtype=torch.uint8, offset=before)
