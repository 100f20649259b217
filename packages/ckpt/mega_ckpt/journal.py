"""A folder that is filled file by file, and after a kill goes on with the file it was at.

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
from mega_common.config import Config
from mega_common.errors import CheckpointError, MegaError
from mega_common.files import install_folder, naming
from mega_common.remote import Place, Remote, RemoteError

JOURNAL, CONTENT, NOTES = "journal.jsonl", "content", "finished"
READ_BYTES = 1 << 22


class Finished(Config):
    """A file that is on the disk, and of the tensors' parts in it, in their order, what does not follow from the plan.

    Attributes:
        parts: their checksums.
        places: where they begin and end.
    """

    file: FileEntry
    parts: tuple[Checksum, ...] = ()
    places: tuple[tuple[int, int], ...] = ()


# Makes the file of a name, which begins with a header, unless it is finished already; returns it either way.
Once = Callable[[str, bytes, Callable[[], Finished]], Finished]


def always(_name: str, _header: bytes, make: Callable[[], Finished]) -> Finished:
    """Make it: nothing can be finished already."""
    return make()


def entry_of(path: Path) -> FileEntry:
    """What a file is, by reading it."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
        return FileEntry(bytes=stream.tell(), checksum=digest.hexdigest())


class Journal(Protocol):
    """What is finished of a folder that is being filled.

    Attributes:
        folder: it.
        made: where its content can be read when it is complete.
        finished: by name, what was finished when it was last written.
        advance: is told the bytes of a file that is kept.
    """

    folder: Place
    made: Place
    finished: dict[str, Finished]
    advance: Callable[[int], object]

    def once(self, name: str, header: bytes, make: Callable[[], Finished]) -> Finished:
        """See `Once`."""


class LocalJournal:
    """The files of `folder` that are finished, as `stream` tells. Removes all others."""

    def __init__(self, folder: Path, stream: IO[str], title: str) -> None:
        self.folder: Place = folder
        self.made: Place = folder
        self.finished: dict[str, Finished] = {}
        self.advance: Callable[[int], object] = lambda _: None
        self._folder, self._stream = folder, stream
        self._read(title)
        for path in [path for path in folder.rglob("*") if not path.is_dir()]:
            if path.relative_to(folder).as_posix() not in self.finished:
                path.unlink()

    def once(self, name: str, header: bytes, make: Callable[[], Finished]) -> Finished:
        """See `Once`."""
        if name not in self.finished or not self._is_sound(name, header):
            (self._folder / name).unlink(missing_ok=True)
            self.finished[name] = make()
            self._write({"name": name, "finished": self.finished[name].model_dump(mode="json")})
        return self.finished[name]

    def _read(self, title: str) -> None:
        """Take the lines up to the first that is not whole, and go on writing there."""
        self._stream.seek(0)
        position = 0
        for number, line in enumerate(iter(self._stream.readline, "")):
            try:
                fields = json.loads(line)
                if number and line.endswith("\n"):
                    self.finished[fields["name"]] = Finished.model_validate_json(json.dumps(fields["finished"]))
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

    def _write(self, line: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(line) + "\n")
        self._sync()

    def _sync(self) -> None:
        with naming(Path(self._stream.name)):
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def _is_sound(self, name: str, header: bytes) -> bool:
        path, expected = self._folder / name, self.finished[name].file
        if not path.is_file() or path.stat().st_size != expected.bytes:
            return False
        with open(path, "rb") as stream:
            if stream.read(len(header)) != header:
                return False
        if entry_of(path) != expected:
            return False
        self.advance(expected.bytes - len(header))
        return True


class RemoteJournal:
    """The objects below `folder` that are finished: each has a small one beside it that says so."""

    def __init__(self, folder: Remote) -> None:
        self.folder: Place = folder
        self.made: Place = folder.parent
        self.advance: Callable[[int], object] = lambda _: None
        self._final, self._notes = folder.parent, folder / NOTES
        self.finished = {note.name: Finished.model_validate_json(note.read_bytes()) for note in self._notes.iterdir()}

    def once(self, name: str, header: bytes, make: Callable[[], Finished]) -> Finished:
        """An object is whole, so that its length and its header tell enough."""
        if name not in self.finished or not self._is_sound(name, header):
            self.finished[name] = make()
            (self._notes / name).write_bytes(self.finished[name].model_dump_json().encode())
        return self.finished[name]

    def _is_sound(self, name: str, header: bytes) -> bool:
        place, expected = Remote(self.folder) / name, self.finished[name].file.bytes
        if not place.is_file() or place.size() != expected or place.read_bytes(0, len(header)) != header:
            return False
        self.advance(expected - len(header))
        return True

    def close(self) -> None:
        """Remove what was only needed to go on, and what was begun here from another source or with other options."""
        self._notes.remove()
        for begun in [place for place in self._final.iterdir() if (place / NOTES).is_dir()]:
            begun.remove()


def continued(final: Place, identity: Mapping[str, Any]) -> contextlib.AbstractContextManager[Journal]:
    """A folder to fill, which becomes `final` on leaving without an error.

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
    return _continued_there(final, key) if isinstance(final, Remote) else _continued_here(final, key, title)


@contextlib.contextmanager
def _continued_there(final: Remote, key: str) -> Iterator[Journal]:
    journal = RemoteJournal(final / key)
    try:
        yield journal
    except BaseException as error:
        if _comes_again(error):
            (final / MANIFEST).remove()
            (final / key).remove()
        raise
    journal.close()


@contextlib.contextmanager
def _continued_here(final: Path, key: str, title: str) -> Iterator[Journal]:
    partial = final.with_name(f".{final.name}.{key}.partial")
    (partial / CONTENT).mkdir(parents=True, exist_ok=True)
    with naming(final), open(partial / JOURNAL, "a+", encoding="utf-8") as stream:
        if not _locked(stream):
            raise CheckpointError(f"{final}: another process is making it", hint="wait for it, or end it")
        journal = LocalJournal(partial / CONTENT, stream, title)
        try:
            yield journal
        except BaseException as error:
            if _comes_again(error) or not journal.finished:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        install_folder(partial / CONTENT, final)
        shutil.rmtree(partial, ignore_errors=True)
    _remove_others(final)


def _comes_again(error: BaseException) -> bool:
    return isinstance(error, MegaError) and not isinstance(error, RemoteError)


def _remove_others(final: Path) -> None:
    """Remove what was begun for `final` from another source or with other options, and is not going on."""
    for path in final.parent.iterdir():
        if path.name.startswith(f".{final.name}.") and path.suffix == ".partial" and (path / JOURNAL).is_file():
            with open(path / JOURNAL, "a", encoding="utf-8") as stream:
                if _locked(stream):
                    shutil.rmtree(path, ignore_errors=True)


def _locked(stream: IO[str]) -> bool:
    """Take the lock of a journal, which is held until it is closed; False when another process has it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
