"""Folder that is filled file by file and, after a kill, resumes with the unfinished file.

    .name.1f9a....partial/journal.jsonl     what is made, from what, how; then a line for each finished file
    .name.1f9a....partial/content/          becomes `name` when all is there

The folder's key is a hash of what is made, from what and how, so that nothing of another source, or of the same one before
it changed, is ever taken. A finished file is believed when it has the header that is wanted and the checksum it had.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import xxhash
from pydantic import ValidationError

from mega_ckpt.manifest import MANIFEST, Checksum, FileEntry
from mega_common.atomic_files import add_path_to_errors, install_folder
from mega_common.errors import CheckpointError, MegaError
from mega_common.object_store import Location, ObjectStoreError, RemotePath
from mega_common.strict_config import StrictConfig

JOURNAL, CONTENT, NOTES = "journal.jsonl", "content", "finished"
READ_BYTES = 1 << 22


class FinishedFile(StrictConfig):
    """A file that is durable on disk, with the checksums and byte ranges of its tensors.

    Attributes:
        parts: their checksums.
        places: where they begin and end.
    """

    file: FileEntry
    parts: tuple[Checksum, ...] = ()
    places: tuple[tuple[int, int], ...] = ()


# Makes the file of a name, which begins with a header, unless it is finished already; returns it either way.
RunOnce = Callable[[str, bytes, Callable[[], FinishedFile]], FinishedFile]


def write_always(_name: str, _header: bytes, make: Callable[[], FinishedFile]) -> FinishedFile:
    """Call `make`: nothing can be finished already."""
    return make()


def hash_file(path: Path) -> FileEntry:
    """Return the length and checksum of a file by reading it."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
        return FileEntry(bytes=stream.tell(), checksum=digest.hexdigest())


class WriteJournal(Protocol):
    """Record of the finished files of a folder that is being filled.

    Attributes:
        folder: it.
        result_folder: where its content can be read when it is complete.
        finished: by name, what was finished when it was last written.
        advance: is told the bytes of a file that is kept.
    """

    folder: Location
    result_folder: Location
    finished: dict[str, FinishedFile]
    advance: Callable[[int], object]

    def write_once(self, name: str, header: bytes, make: Callable[[], FinishedFile]) -> FinishedFile:
        """Write the file `name` unless it is finished already; return its entry either way."""


class LocalJournal:
    """Journal on a file system: the files of `folder` that `stream` records as finished. All other files are removed."""

    def __init__(self, folder: Path, stream: IO[str], title: str) -> None:
        self.folder: Location = folder
        self.result_folder: Location = folder
        self.finished: dict[str, FinishedFile] = {}
        self.advance: Callable[[int], object] = lambda _: None
        self._folder, self._stream = folder, stream
        self._read_journal(title)
        for path in [path for path in folder.rglob("*") if not path.is_dir()]:
            if path.relative_to(folder).as_posix() not in self.finished:
                path.unlink()

    def write_once(self, name: str, header: bytes, make: Callable[[], FinishedFile]) -> FinishedFile:
        """Write the file `name` unless it is finished already; return its entry either way."""
        if name not in self.finished or not self._is_sound(name, header):
            (self._folder / name).unlink(missing_ok=True)
            self.finished[name] = make()
            self._append_line({"name": name, "finished": self.finished[name].model_dump(mode="json")})
        return self.finished[name]

    def _read_journal(self, title: str) -> None:
        """Read the lines up to the first incomplete one, and continue writing there."""
        self._stream.seek(0)
        position = 0
        for number, line in enumerate(iter(self._stream.readline, "")):
            try:
                fields = json.loads(line)
                if number and line.endswith("\n"):
                    self.finished[fields["name"]] = FinishedFile.model_validate_json(json.dumps(fields["finished"]))
                elif line != title:
                    break
            except (ValueError, KeyError, TypeError, ValidationError):
                break
            position = self._stream.tell()
        self._stream.seek(position)
        self._stream.truncate()
        if not position:
            self._stream.write(title)
            self._sync()

    def _append_line(self, line: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(line) + "\n")
        self._sync()

    def _sync(self) -> None:
        with add_path_to_errors(Path(self._stream.name)):
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def _is_sound(self, name: str, header: bytes) -> bool:
        path, expected = self._folder / name, self.finished[name].file
        if not path.is_file() or path.stat().st_size != expected.bytes:
            return False
        with open(path, "rb") as stream:
            if stream.read(len(header)) != header:
                return False
        if hash_file(path) != expected:
            return False
        self.advance(expected.bytes - len(header))
        return True


class RemoteJournal:
    """Journal on an object store: each finished object below `folder` has a small note object."""

    def __init__(self, folder: RemotePath) -> None:
        self.folder: Location = folder
        self.result_folder: Location = folder.parent
        self.advance: Callable[[int], object] = lambda _: None
        self._final, self._notes = folder.parent, folder / NOTES
        self.finished = {
            note.name: FinishedFile.model_validate_json(note.read_bytes()) for note in self._notes.iterdir()
        }

    def write_once(self, name: str, header: bytes, make: Callable[[], FinishedFile]) -> FinishedFile:
        """Write the object `name` unless it is finished. Objects are atomic, so length and header suffice as a check."""
        if name not in self.finished or not self._is_sound(name, header):
            self.finished[name] = make()
            (self._notes / name).write_bytes(self.finished[name].model_dump_json().encode())
        return self.finished[name]

    def _is_sound(self, name: str, header: bytes) -> bool:
        place, expected = RemotePath(self.folder) / name, self.finished[name].file.bytes
        if not place.is_file() or place.get_object_size() != expected or place.read_bytes(0, len(header)) != header:
            return False
        self.advance(expected - len(header))
        return True

    def remove_notes(self) -> None:
        """Remove the notes, and the leftovers of conversions from another source or with other options."""
        self._notes.delete_objects()
        for begun in [place for place in self._final.iterdir() if (place / NOTES).is_dir()]:
            begun.delete_objects()


def open_resumable(final: Location, identity: Mapping[str, Any]) -> contextlib.AbstractContextManager[WriteJournal]:
    """Open a folder to fill, which becomes `final` when the context exits without an error.

    After an error that would come again, nothing is left. After any other one, an interrupt or a kill, the finished files
    are, and the same call goes on with them.

    On an object store it lies below `final`, and whoever puts a manifest into that makes it so.

    Args:
        final: the folder to make; one that is there is replaced.
        identity: what decides the content, as JSON.

    Raises:
        CheckpointError: when another process is at it.
    """
    title = json.dumps(identity, sort_keys=True) + "\n"
    key = hashlib.sha256(title.encode()).hexdigest()[:12]
    return _open_remote(final, key) if isinstance(final, RemotePath) else _open_local(final, key, title)


@contextlib.contextmanager
def _open_remote(final: RemotePath, key: str) -> Iterator[WriteJournal]:
    journal = RemoteJournal(final / key)
    try:
        yield journal
    except BaseException as error:
        if _is_permanent(error):
            (final / MANIFEST).delete_objects()
            (final / key).delete_objects()
        raise
    journal.remove_notes()


@contextlib.contextmanager
def _open_local(final: Path, key: str, title: str) -> Iterator[WriteJournal]:
    partial = final.with_name(f".{final.name}.{key}.partial")
    (partial / CONTENT).mkdir(parents=True, exist_ok=True)
    with add_path_to_errors(final), open(partial / JOURNAL, "a+", encoding="utf-8") as stream:
        if not _try_lock(stream):
            raise CheckpointError(f"{final}: another process is making it", hint="wait for it, or end it")
        journal = LocalJournal(partial / CONTENT, stream, title)
        try:
            yield journal
        except BaseException as error:
            if _is_permanent(error) or not journal.finished:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        install_folder(partial / CONTENT, final)
        shutil.rmtree(partial, ignore_errors=True)
    _remove_stale(final)


def _is_permanent(error: BaseException) -> bool:
    return isinstance(error, MegaError) and not isinstance(error, ObjectStoreError)


def _remove_stale(final: Path) -> None:
    """Remove unfinished folders for `final` from another source or with other options, unless a process holds their
    lock.
    """
    for path in final.parent.iterdir():
        if path.name.startswith(f".{final.name}.") and path.suffix == ".partial" and (path / JOURNAL).is_file():
            with open(path / JOURNAL, "a", encoding="utf-8") as stream:
                if _try_lock(stream):
                    shutil.rmtree(path, ignore_errors=True)


def _try_lock(stream: IO[str]) -> bool:
    """Take the lock of a journal, held until it is closed; return False if another process has it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
