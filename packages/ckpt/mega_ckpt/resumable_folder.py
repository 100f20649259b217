"""Folder that is written file by file and, after a kill, resumed with the unfinished file.

    .name.1f9a....partial/journal.jsonl     identity of the output; then a line for each finished file
    .name.1f9a....partial/content/          becomes `name` when it is complete

The folder name has a hash of the identity (sources, options), so that files of another source, or of an older version of
the source, are never reused. A finished file is reused if it has the expected header and its recorded checksum.
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

from mega_ckpt.manifest import MANIFEST, Checksum, ManifestFileEntry
from mega_common.atomic_files import add_path_to_errors, rename_folder_into_place
from mega_common.errors import CheckpointError, MegaError
from mega_common.object_store import Location, ObjectStoreError, RemotePath
from mega_common.strict_config import StrictConfig

JOURNAL, CONTENT, NOTES = "journal.jsonl", "content", "finished"
READ_BYTES = 1 << 22


class FinishedFile(StrictConfig):
    """Record of a file that is complete and durable on disk, with the checksums and byte ranges of its tensors.

    Attributes:
        parts: checksums of the tensors.
        places: byte ranges of the tensors, (begin, end).
    """

    file: ManifestFileEntry
    parts: tuple[Checksum, ...] = ()
    places: tuple[tuple[int, int], ...] = ()


# Function (name, header, make) that calls `make` unless the file with that name and header is finished; returns its entry.
RunOnce = Callable[[str, bytes, Callable[[], FinishedFile]], FinishedFile]


def write_without_journal(_name: str, _header: bytes, make: Callable[[], FinishedFile]) -> FinishedFile:
    """Call `make`, which writes a file, and return its result: `WriteJournal.write_once` without a journal."""
    return make()


def hash_file(path: Path) -> ManifestFileEntry:
    """Read a file and return its length and XXH3-128 checksum."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
        return ManifestFileEntry(bytes=stream.tell(), checksum=digest.hexdigest())


class WriteJournal(Protocol):
    """Interface of a record of the finished files in a folder, with which an interrupted call resumes.

    Attributes:
        folder: the folder.
        result_folder: folder from which the complete content can be read.
        finished: finished files by name.
        advance: called with the bytes of a finished file that is reused.
    """

    folder: Location
    result_folder: Location
    finished: dict[str, FinishedFile]
    advance: Callable[[int], object]

    def write_once(self, name: str, header: bytes, make: Callable[[], FinishedFile]) -> FinishedFile:
        """Write the file `name` by calling `make`, unless it is finished already; return its record either way.
        `header` is the file's expected beginning.
        """


class LocalJournal:
    """Journal of the finished files of a local folder, by which an interrupted conversion resumes.
    Files of `folder` recorded in `stream` are finished. All other files are removed by the constructor.
    """

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
        """Write the file `name` by calling `make`, unless it is finished already; return its record either way.
        `header` is the file's expected beginning.
        """
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
    """Journal on an object store by which an interrupted conversion resumes: a note for each finished object."""

    def __init__(self, folder: RemotePath) -> None:
        self.folder: Location = folder
        self.result_folder: Location = folder.parent
        self.advance: Callable[[int], object] = lambda _: None
        self._final, self._notes = folder.parent, folder / NOTES
        self.finished = {
            note.name: FinishedFile.model_validate_json(note.read_bytes()) for note in self._notes.iterdir()
        }

    def write_once(self, name: str, header: bytes, make: Callable[[], FinishedFile]) -> FinishedFile:
        """Write the object `name` by calling `make`, unless it is finished; return its record either way.
        Objects are atomic, so length and `header` suffice as a check.
        """
        if name not in self.finished or not self._is_sound(name, header):
            self.finished[name] = make()
            (self._notes / name).write_bytes(self.finished[name].model_dump_json().encode())
        return self.finished[name]

    def _is_sound(self, name: str, header: bytes) -> bool:
        path, expected = RemotePath(self.folder) / name, self.finished[name].file.bytes
        if not path.is_file() or path.get_object_size() != expected or path.read_bytes(0, len(header)) != header:
            return False
        self.advance(expected - len(header))
        return True

    def remove_notes(self) -> None:
        """Remove the note objects of the conversion, and unfinished objects of other conversions.
        The latter are conversions to the same destination from another source or with other options.
        """
        self._notes.delete_objects()
        for unfinished in [path for path in self._final.iterdir() if (path / NOTES).is_dir()]:
            unfinished.delete_objects()


def open_resumable_folder(
    final: Location, identity: Mapping[str, Any]
) -> contextlib.AbstractContextManager[WriteJournal]:
    """Context manager that yields a journal of a folder to fill, which becomes `final` on success.
    The folder is complete when the context exits without an error. An interrupted call with the same `identity`
    resumes.

    After an error that would recur, no files are left. After another error, an interrupt or a kill, the finished files are
    kept, and the same call resumes with them.

    On an object store the folder is below `final`, and becomes the result when the caller puts a manifest into `final`.

    Args:
        final: the folder to create; an existing one is replaced.
        identity: everything that determines the content, as JSON.

    Raises:
        CheckpointError: when another process is writing the same output.
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
            raise CheckpointError(f"{final}: another process is writing it", hint="wait for that process, or end it")
        journal = LocalJournal(partial / CONTENT, stream, title)
        try:
            yield journal
        except BaseException as error:
            if _is_permanent(error) or not journal.finished:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        rename_folder_into_place(partial / CONTENT, final)
        shutil.rmtree(partial, ignore_errors=True)
    _remove_stale(final)


def _is_permanent(error: BaseException) -> bool:
    return isinstance(error, MegaError) and not isinstance(error, ObjectStoreError)


def _remove_stale(final: Path) -> None:
    """Remove unfinished folders for `final` with another identity, unless a process has their lock."""
    for path in final.parent.iterdir():
        if path.name.startswith(f".{final.name}.") and path.suffix == ".partial" and (path / JOURNAL).is_file():
            with open(path / JOURNAL, "a", encoding="utf-8") as stream:
                if _try_lock(stream):
                    shutil.rmtree(path, ignore_errors=True)


def _try_lock(stream: IO[str]) -> bool:
    """Take the lock of a journal, until it is closed; return False if another process has it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
