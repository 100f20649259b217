"""Paths on an object store (`s3://bucket/run` and other URLs) by fsspec.

An object appears complete when its last byte is acknowledged, and cannot be renamed. Settings of the store (region,
endpoint, credentials) are those of its client: environment variables or fsspec's configuration files.
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

READ_AHEAD = 1 << 23  # bytes of one request


class ObjectVersion(NamedTuple):
    """Version of an object in an object store: size in bytes, and ETag or modification time ("" if the store reports neither)."""

    size: int
    state: str


class ObjectStoreError(MegaError):
    """Error for an object store that cannot be reached or refuses a request, so its contents are unknown."""


class RemotePath(str):
    """Path on an object store, as a URL string.
    It has the methods of `pathlib.Path` that readers of checkpoints and data need.

    Raises:
        ObjectStoreError: from every method, if the store cannot be reached or refuses the request.
        MissingPackageError: from every method, if the client of the store is not installed.
    """

    __slots__ = ()

    def __truediv__(self, name: object) -> RemotePath:
        return RemotePath(f"{self}/{name}")

    @property
    def name(self) -> str:
        """Last component of the remote path."""
        return self.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """Remote path without its last component."""
        return RemotePath(self.rpartition("/")[0])

    def is_file(self) -> bool:
        """Return whether an object with exactly this path exists."""
        return self._get_entry_kind() == "file"

    def is_dir(self) -> bool:
        """Return whether objects below this path exist."""
        return self._get_entry_kind() == "directory"

    def exists(self) -> bool:
        """Return whether an object with this path, or objects below it, exist."""
        return self._get_entry_kind() is not None

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the direct children of this remote folder, sorted by name; nothing if there are none."""
        with self._connect() as (files, path):
            try:
                names = files.ls(path, detail=False)
            except FileNotFoundError:
                names = []
        for name in sorted(names):
            yield self / name.rstrip("/").rpartition("/")[2]

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield the direct children of this remote folder whose names match the shell `pattern`.
        Subfolders are not searched.
        """
        return (child for child in self.iterdir() if fnmatch(child.name, pattern))

    def read_bytes(self, begin: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes [begin, end) of this object, by default all; only these are transferred.

        Raises:
            FileNotFoundError: if the object does not exist.
        """
        with self._connect() as (files, path):
            return bytes(files.cat_file(path, start=begin, end=end))

    def write_bytes(self, data: bytes) -> None:
        """Write this object with the content `data`, in one request that replaces an existing object."""
        with self._connect(writing=True) as (files, path):
            files.pipe_file(path, data)

    def get_object_size(self) -> int:
        """Return the size of this object in bytes.

        Raises:
            FileNotFoundError: if the object does not exist.
        """
        with self._connect() as (files, path):
            return int(files.info(path)["size"])

    def list_object_sizes(self) -> dict[str, int]:
        """Return {name relative to this path: size in bytes} of all objects below this path."""
        return {name: int(entry["size"]) for name, entry in self._list_entries_below().items()}

    def list_object_versions(self) -> dict[str, str]:
        """Return {name relative to this path: text with size and ETag or modification time} of all objects below this path."""
        return {
            name: f"{entry['size']} bytes {_get_entry_state(entry)}"
            for name, entry in self._list_entries_below().items()
        }

    def open(self) -> IO[bytes]:
        """Open this object as a binary stream for reading with random access.

        Raises:
            FileNotFoundError: if the object does not exist.
        """
        with self._connect() as (files, path):
            stream = files.open(path, "rb", block_size=READ_AHEAD, cache_type="readahead")
        if (cache := getattr(stream, "cache", None)) is not None:
            cache.fetcher = _require_exact_ranges(self, cache.fetcher)
        return stream  # type: ignore[no-any-return]

    def glob_object_versions(self) -> dict[str, ObjectVersion]:
        """Return {URL: size and version}, by name, of all objects that match this glob, or are at or below this path."""
        with self._connect() as (files, path):
            entries = files.glob(path, detail=True) if glob.has_magic(path) else files.find(path, detail=True)
            return {
                f"{self}{name[len(path) :]}"
                if name.startswith(path)
                else str(files.unstrip_protocol(name)): ObjectVersion(int(entry["size"] or 0), _get_entry_state(entry))
                for name, entry in sorted(entries.items())
                if entry["type"] == "file"
            }

    def upload_file(self, file: Path, advance: Callable[[int], object]) -> None:
        """Upload a local file as this object, which appears only when complete.
        `advance` is called with the number of bytes sent.
        """
        callback = fsspec.Callback()
        callback.relative_update = advance
        with self._connect(writing=True) as (files, path):
            files.put_file(str(file), path, callback=callback)

    def open_multipart_upload(self) -> IO[bytes]:
        """Open this object for writing in parts; closing the stream makes it appear, discarding the stream does not."""
        with self._connect(writing=True) as (files, path):
            return files.open(path, "wb")  # type: ignore[no-any-return]

    def delete_objects(self) -> None:
        """Delete this object, or all objects below this path; do nothing if there are none.

        Raises:
            ObjectStoreError: if an object still exists; a client may not report keys that a bulk deletion has skipped.
        """
        with self._connect() as (files, path):
            with contextlib.suppress(FileNotFoundError):
                files.rm(path, recursive=True)
            files.invalidate_cache()
            left: list[str] = []
            with contextlib.suppress(FileNotFoundError):  # the bucket may be missing
                left = files.find(path)
            if left:
                raise ObjectStoreError(
                    f"{self}: the store did not delete {len(left)} objects, such as {left[0]}",
                    hint="check that the credentials allow deletion",
                )

    def _list_entries_below(self) -> dict[str, Any]:
        with self._connect() as (files, path):
            entries = files.find(path, detail=True)
        return {name[len(path.rstrip("/")) + 1 :]: entry for name, entry in entries.items() if entry}

    def _get_entry_kind(self) -> str | None:
        with self._connect() as (files, path):
            try:
                return str(files.info(path)["type"])
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _connect(self, *, writing: bool = False) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path on it; convert errors in the block to one sentence."""
        with convert_object_store_errors(self, writing=writing):
            files, path = fsspec.core.url_to_fs(str(self))
            files.invalidate_cache()  # other machines may have written
            yield files, path


def _require_exact_ranges(source: RemotePath, fetch: Callable[[int, int], bytes]) -> Callable[[int, int], bytes]:
    """Return a function that reads a range of `source` by `fetch` and rejects a response of another length.

    A store or proxy may truncate a response, or ignore the range and send the whole object with status 200.
    """

    def fetch_exactly(begin: int, end: int) -> bytes:
        data = fetch(begin, end)
        if len(data) != end - begin:
            raise ObjectStoreError(
                f"{source}: the store sent {len(data):,} bytes for the range [{begin:,}, {end:,})",
                hint="a proxy may ignore ranges, or the object is being replaced; try again",
            )
        return data

    return fetch_exactly


def _get_entry_state(entry: Mapping[str, Any]) -> str:
    keys = ("ETag", "etag", "LastModified", "updated", "created", "mtime", "blob_id")
    return str(next((entry[key] for key in keys if entry.get(key)), ""))


@contextlib.contextmanager
def convert_object_store_errors(path: RemotePath, *, writing: bool = False) -> Iterator[None]:
    """Context manager that converts a store client's exceptions to ObjectStoreError; a missing object stays FileNotFoundError.
    The client's exceptions share no base class. The error is one sentence that names `path`.

    A missing object remains a FileNotFoundError, except while `writing`.
    """
    try:
        yield
    except MegaError:
        raise
    except ImportError as error:
        raise MissingPackageError(
            f"{path}: {error}",
            hint="for s3://: pip install s3fs, for gs://: pip install gcsfs, else the package named by fsspec",
        ) from error
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not writing:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(path)) from error
        # what the store's client says, which names the cause better than a class of errors
        first = re.sub(r"^\[Errno -?\d+\] ", "", next(iter(str(error).strip().splitlines()), ""))
        raise ObjectStoreError(
            f"{path}: cannot be accessed ({': '.join(filter(None, (type(error).__name__, first)))})",
            hint="check the URL, the endpoint and the credentials of the object store",
        ) from error


Location = Path | RemotePath


def parse_location(path: str | Path) -> Location:
    """Return `path` as a local path, or as a `RemotePath` if it is a URL such as s3://bucket/run.

    Raises:
        ConfigError: if fsspec does not support the protocol of the URL.
    """
    if isinstance(path, (Path, RemotePath)):
        return path
    match = _URL.fullmatch(path)
    if match is None:
        return Path(path)
    if match["protocol"] in ("file", "local"):
        return Path(match["path"])
    if match["protocol"] not in _list_protocols():
        raise ConfigError(
            f"{path}: the protocol {match['protocol']}:// is not supported",
            hint="use a URL such as s3://, gs:// or az://",
        )
    return RemotePath(path.rstrip("/"))


def _list_protocols() -> Sequence[str]:
    return [*fsspec.available_protocols(), *fsspec.registry]


def read_if_remote(path: Location) -> Path | bytes:
    """Return a local path unchanged, or the content of a small remote file, for code that copies files."""
    return path.read_bytes() if isinstance(path, RemotePath) else path
