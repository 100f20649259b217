"""Local copies of token files given by URL, downloaded once because tokens are read through a memory map.

    CACHE/wiki-5f3a1c.../wiki.bin, wiki.idx, wiki.info      named by URL and state: a changed data set is a new copy

An interrupted download resumes; processes that need the same copy wait for the one that downloads it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from mega_common.errors import DataError
from mega_common.object_store import (
    ObjectStoreError,
    ObjectVersion,
    RemotePath,
    convert_object_store_errors,
    parse_location,
)
from mega_common.progress_logging import ProgressBar
from mega_data.token_files.partial_folder import (
    convert_write_errors_to_data_error,
    get_partial_folder,
    hold_partial_folder,
    move_files_durably,
)

BLOCK = 1 << 23  # bytes
SUFFIXES = (
    "info",
    "mask.bin",
    "mask.idx",
    "images.bin",
    "images.idx",
    "bin",
    "idx",
)  # in the order of the renames


def resolve_local_prefix(prefix: Path, cache: Path | None = None) -> Path:
    """Return a local prefix of a data set, after downloading the data set if the prefix is a URL.
    A local prefix is returned unchanged. For a URL, the data set is downloaded if needed, and the result is the prefix
    of the copy in `cache`, by default `~/.cache/mega/data`.

    A `Path` made from a URL, which drops one of its slashes, is accepted as that URL.

    Raises:
        DataError: if the data set does not exist, or the copy cannot be written.
        RemoteError: if the object store cannot be read.
    """
    remote = parse_location(restore_url_slashes(prefix))
    if not isinstance(remote, RemotePath):
        return remote
    remote = RemotePath(re.sub(r"\.(bin|idx)$", "", remote))
    stamps = {
        name: stamp for name in SUFFIXES for stamp in RemotePath(f"{remote}.{name}").glob_object_versions().values()
    }
    for name in ("idx", "bin"):
        if name not in stamps:
            raise DataError(f"{remote}.{name}: no such object")
    key = hashlib.sha256(repr([remote, stamps]).encode()).hexdigest()[:12]
    local = (cache or default_cache_folder()) / f"{remote.name}-{key}" / remote.name
    if not _add_suffix(local, "idx").exists():
        with convert_write_errors_to_data_error(local):
            _download_dataset(remote, stamps, local)
    return local


def default_cache_folder() -> Path:
    """Return `~/.cache/mega/data`, the default folder for copies of remote data sets and tokens of raw data."""
    return Path.home() / ".cache" / "mega" / "data"


def restore_url_slashes(path: Path) -> str:
    """Return a path as text; for a URL held in a `Path`, with the second slash after the protocol restored."""
    return re.sub(r"^([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])", r"\1://", str(path))


def _add_suffix(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{name}")


def _download_dataset(remote: RemotePath, stamps: Mapping[str, ObjectVersion], local: Path) -> None:
    folder = get_partial_folder(local)
    with hold_partial_folder(folder):
        total = sum(stamp.size for stamp in stamps.values())
        with ProgressBar(f"downloading {remote}", total=total, unit="bytes") as bar:
            for name, stamp in stamps.items():
                if not _add_suffix(local, name).exists():  # else another process has downloaded it meanwhile
                    _download_rest(RemotePath(f"{remote}.{name}"), folder / name, stamp.size, bar)
        move_files_durably(folder, {name: _add_suffix(local, name) for name in stamps})


def _download_rest(source: RemotePath, target: Path, size: int, bar: ProgressBar) -> None:
    """Download the missing rest of an object."""
    with open(target, "ab") as copy, _open_object(source) as stream:
        bar.advance(copy.tell())
        stream.seek(copy.tell())
        while block := _read_block(source, stream):
            copy.write(block)
            bar.advance(len(block))
        if copy.tell() != size:
            raise ObjectStoreError(
                f"{source}: {copy.tell():,} of {size:,} bytes were received", hint="run the command again"
            )
        os.fsync(copy.fileno())


def _open_object(source: RemotePath) -> IO[bytes]:
    try:
        return source.open()
    except FileNotFoundError as error:
        raise ObjectStoreError(
            f"{source}: was removed during the download", hint="check that nobody rewrites the data set, and try again"
        ) from error


def _read_block(source: RemotePath, stream: IO[bytes]) -> bytes:
    with convert_object_store_errors(source, writing=True):
        return stream.read(BLOCK)
