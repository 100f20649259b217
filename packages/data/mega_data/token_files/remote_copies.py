"""Local copies of token files given by URL, downloaded once because tokens are read through a memory map.

    CACHE/wiki-5f3a1c.../wiki.bin, wiki.idx, wiki.info      named by URL and state: a data set that changes is another one

A fetch that was ended goes on where it was; processes that want the same copy wait for the one that fetches it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from mega_common.errors import DataError
from mega_common.object_store import ObjectStoreError, RemotePath, Stamp, parse_location, translate_store_errors
from mega_common.progress_logging import ProgressBar
from mega_data.preprocessing.partial_folder import (
    get_partial_folder,
    lock_partial_folder,
    remove_partial_folder,
    rename_files,
    translate_write_errors,
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
)  # in the order in which they take their names


def resolve_local_prefix(prefix: Path, cache: Path | None = None) -> Path:
    """Return a local prefix unchanged; for a URL, the prefix of a copy in `cache`, by default `~/.cache/mega/data`.

    A `Path` of a URL, which has lost one of its slashes, is taken for the URL.

    Raises:
        DataError: when there is no such data set, or the disk refuses.
        RemoteError: when the object store cannot be asked.
    """
    where = parse_location(restore_url(prefix))
    if not isinstance(where, RemotePath):
        return where
    where = RemotePath(re.sub(r"\.(bin|idx)$", "", where))
    found = {name: stamp for name in SUFFIXES for stamp in RemotePath(f"{where}.{name}").match_objects().values()}
    for name in ("idx", "bin"):
        if name not in found:
            raise DataError(f"{where}.{name}: no such object")
    key = hashlib.sha256(repr([where, found]).encode()).hexdigest()[:12]
    made = (cache or default_cache_folder()) / f"{where.name}-{key}" / where.name
    if not _add_suffix(made, "idx").exists():
        with translate_write_errors(made):
            _download_dataset(where, found, made)
    return made


def default_cache_folder() -> Path:
    """Return the cache folder for copies if the configuration names none."""
    return Path.home() / ".cache" / "mega" / "data"


def restore_url(path: Path) -> str:
    """Return a path as the user wrote it, if that was a URL."""
    return re.sub(r"^([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])", r"\1://", str(path))


def _add_suffix(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{name}")


def _download_dataset(where: RemotePath, found: Mapping[str, Stamp], made: Path) -> None:
    folder = get_partial_folder(made)
    lock = lock_partial_folder(folder, wait=True)
    assert lock is not None
    try:
        with ProgressBar(f"fetching {where}", total=sum(stamp.size for stamp in found.values()), unit="bytes") as bar:
            for name, stamp in found.items():
                if not _add_suffix(made, name).exists():  # else fetched by another, which was waited for
                    _download_rest(RemotePath(f"{where}.{name}"), folder / name, stamp.size, bar)
        rename_files(folder, {name: _add_suffix(made, name) for name in found})
        remove_partial_folder(folder)
    finally:
        os.close(lock)


def _download_rest(source: RemotePath, target: Path, size: int, bar: ProgressBar) -> None:
    """Download the part of an object that is not there yet."""
    with open(target, "ab") as copy, _open_object(source) as stream:
        bar.advance(copy.tell())
        stream.seek(copy.tell())
        while block := _read_block(source, stream):
            copy.write(block)
            bar.advance(len(block))
        if copy.tell() != size:
            raise ObjectStoreError(f"{source}: {copy.tell():,} bytes came of {size:,}", hint="did it change just now?")
        os.fsync(copy.fileno())


def _open_object(source: RemotePath) -> IO[bytes]:
    try:
        return source.open()
    except FileNotFoundError as error:
        raise ObjectStoreError(
            f"{source}: no such object any more", hint="it was listed just now; try again"
        ) from error


def _read_block(source: RemotePath, stream: IO[bytes]) -> bytes:
    with translate_store_errors(source, writing=True):
        return stream.read(BLOCK)
