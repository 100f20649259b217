"""Places on an object store, `s3://bucket/run` and the like, by fsspec.

An object appears whole when its last byte is acknowledged, and cannot be renamed. The store's own settings (region,
endpoint, who one is) come from its client: environment variables or fsspec's configuration files.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, NamedTuple

import fsspec

from mega_common.errors import ConfigError, MegaError, MissingPackageError

_URL = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)://(?P<path>.+)")


READ_AHEAD = 1 << 23  # bytes that are asked for at once


class Stamp(NamedTuple):
    """How long an object is, and what its store calls the content or when it was put, empty where it does not tell."""

    size: int
    state: str


class RemoteError(MegaError):
    """An object store that cannot be reached, or refuses. Nothing is known then of what is there."""


class Remote(str):
    """A place on an object store: its URL. Has of `pathlib.Path` what readers of checkpoints and data need.

    Raises:
        RemoteError: from every method, when the store cannot be asked.
        MissingPackageError: from every method, when the store's client is not installed.
    """

    __slots__ = ()

    def __truediv__(self, name: object) -> Remote:
        return Remote(f"{self}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        """All but the last part."""
        return Remote(self.rpartition("/")[0])

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether there are objects below."""
        return self._kind() == "directory"

    def exists(self) -> bool:
        """Whether it is one of the two."""
        return self._kind() is not None

    def iterdir(self) -> Iterator[Remote]:
        """What is directly below; nothing when there is nothing."""
        with self._asked() as (files, path):
            try:
                found = files.ls(path, detail=False)
            except FileNotFoundError:
                found = []
        for name in sorted(found):
            yield self / name.rstrip("/").rpartition("/")[2]

    def glob(self, pattern: str) -> Iterator[Remote]:
        """What is directly below and has such a name."""
        return (place for place in self.iterdir() if fnmatch(place.name, pattern))

    def read_bytes(self, begin: int | None = None, end: int | None = None) -> bytes:
        """An object's bytes [begin, end), and no others; default: all.

        Raises:
            FileNotFoundError: when there is none.
        """
        with self._asked() as (files, path):
            return bytes(files.cat_file(path, start=begin, end=end))

    def write_bytes(self, data: bytes) -> None:
        """Put an object whole, in one request that replaces what was there."""
        with self._asked(writing=True) as (files, path):
            files.pipe_file(path, data)

    def size(self) -> int:
        """An object's length.

        Raises:
            FileNotFoundError: when there is none.
        """
        with self._asked() as (files, path):
            return int(files.info(path)["size"])

    def sizes(self) -> dict[str, int]:
        """{name below this place: length} of all objects below."""
        return {name: int(entry["size"]) for name, entry in self._below().items()}

    def stamps(self) -> dict[str, str]:
        """{name below this place: length and what the store calls the content, or when it was put}."""
        return {name: f"{entry['size']} bytes {_state(entry)}" for name, entry in self._below().items()}

    def open(self) -> IO[bytes]:
        """An object to read from anywhere in it.

        Raises:
            FileNotFoundError: when there is none.
        """
        with self._asked() as (files, path):
            stream = files.open(path, "rb", block_size=READ_AHEAD, cache_type="readahead")
        if (cache := getattr(stream, "cache", None)) is not None:
            cache.fetcher = _exact_ranges(self, cache.fetcher)
        return stream  # type: ignore[no-any-return]

    def matches(self) -> dict[str, Stamp]:
        """{URL: size and state} of all objects that a glob matches, sorted by name, or of all below this place."""
        with self._asked() as (files, path):
            found = files.glob(path, detail=True) if glob.has_magic(path) else files.find(path, detail=True)
            return {
                f"{self}{name[len(path) :]}" if name.startswith(path) else str(files.unstrip_protocol(name)): Stamp(
                    int(entry["size"] or 0), _state(entry)
                )
                for name, entry in sorted(found.items())
                if entry["type"] == "file"
            }

    def put(self, file: Path, advance: Callable[[int], object]) -> None:
        """Copy a file to be this object, which appears when all of it is there; `advance` is told the bytes."""
        callback = fsspec.Callback()
        callback.relative_update = advance
        with self._asked(writing=True) as (files, path):
            files.put_file(str(file), path, callback=callback)

    def open_new(self) -> IO[bytes]:
        """An object to write in parts; closing it makes it appear, discarding it does not."""
        with self._asked(writing=True) as (files, path):
            return files.open(path, "wb")  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Delete the object, or all objects below. Nothing happens when there is nothing.

        Raises:
            RemoteError: when an object is still there; a client may not report the keys that a bulk deletion refuses.
        """
        with self._asked() as (files, path):
            with contextlib.suppress(FileNotFoundError):
                files.rm(path, recursive=True)
            files.invalidate_cache()
            left: list[str] = []
            with contextlib.suppress(FileNotFoundError):  # nor is there a bucket
                left = files.find(path)
            if left:
                raise RemoteError(
                    f"{self}: the store did not delete {len(left)} objects, {left[0]} among them",
                    hint="do the credentials allow deleting there?",
                )

    def _below(self) -> dict[str, Any]:
        with self._asked() as (files, path):
            found = files.find(path, detail=True)
        return {name[len(path.rstrip("/")) + 1 :]: entry for name, entry in found.items() if entry}

    def _kind(self) -> str | None:
        with self._asked() as (files, path):
            try:
                return str(files.info(path)["type"])
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _asked(self, *, writing: bool = False) -> Iterator[tuple[Any, str]]:
        """The file system and the path there; what goes wrong in the block is one sentence."""
        with in_words(self, writing=writing):
            files, path = fsspec.core.url_to_fs(str(self))
            files.invalidate_cache()  # other machines write too
            yield files, path


def _exact_ranges(source: Remote, fetch: Callable[[int, int], bytes]) -> Callable[[int, int], bytes]:
    """Return a function that reads a range of `source` by `fetch` and refuses an answer of another length.

    A store or proxy between may cut an answer, or ignore the range and send the whole object with status 200.
    """

    def fetch_exactly(begin: int, end: int) -> bytes:
        data = fetch(begin, end)
        if len(data) != end - begin:
            raise RemoteError(
                f"{source}: the store sent {len(data):,} bytes for the range [{begin:,}, {end:,})",
                hint="a proxy may ignore ranges, or the object is being replaced; try again",
            )
        return data

    return fetch_exactly


def _state(entry: Mapping[str, Any]) -> str:
    told = ("ETag", "etag", "LastModified", "updated", "created", "mtime", "blob_id")
    return str(next((entry[key] for key in told if entry.get(key)), ""))


@contextlib.contextmanager
def in_words(place: Remote, *, writing: bool = False) -> Iterator[None]:
    """Turn what a store's client raises into one sentence. The errors of the clients share no base class.

    That there is no such object is an answer, unless one is `writing`.
    """
    try:
        yield
    except MegaError:
        raise
    except ImportError as error:
        raise MissingPackageError(
            f"{place}: {error}",
            hint="for s3://: pip install s3fs, for gs://: pip install gcsfs; else the package that fsspec names",
        ) from error
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not writing:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(place)) from error
        first = next(iter(str(error).strip().splitlines()), "")
        raise RemoteError(
            f"{place}: {type(error).__name__}: {first}".removesuffix(": "),
            hint="is the store there, and do the credentials allow it?",
        ) from error


Place = Path | Remote


def place(path: str | Path) -> Place:
    """What a user calls a folder: a path here, or a URL such as s3://bucket/run.

    Raises:
        ConfigError: when the URL's protocol is none that fsspec knows.
    """
    if isinstance(path, (Path, Remote)):
        return path
    found = _URL.fullmatch(path)
    if found is None:
        return Path(path)
    if found["protocol"] in ("file", "local"):
        return Path(found["path"])
    if found["protocol"] not in _protocols():
        raise ConfigError(f"{path}: no object store is called {found['protocol']}://", hint="s3://, gs://, az://")
    return Remote(path.rstrip("/"))


def _protocols() -> Sequence[str]:
    return [*fsspec.available_protocols(), *fsspec.registry]


def content_of(path: Place) -> Path | bytes:
    """A small file as those take it that copy files: a path here, else its bytes."""
    return path.read_bytes() if isinstance(path, Remote) else path
