"""Token files by URL: a copy on this machine, fetched once, for tokens are read through a memory map.

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
from mega_common.log import ProgressBar
from mega_common.remote import Remote, RemoteError, Stamp, in_words, place
from mega_data.making.partial import discard, give_names, hold, partial_folder, refusals

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


def local_prefix(prefix: Path, cache: Path | None = None) -> Path:
    """A prefix as it is; of one that is a URL, that of a copy in `cache`, by default `~/.cache/mega/data`.

    A `Path` of a URL, which has lost one of its slashes, is taken for the URL.

    Raises:
        DataError: when there is no such data set, or the disk refuses.
        RemoteError: when the object store cannot be asked.
    """
    where = place(as_given(prefix))
    if not isinstance(where, Remote):
        return where
    where = Remote(re.sub(r"\.(bin|idx)$", "", where))
    found = {name: stamp for name in SUFFIXES for stamp in Remote(f"{where}.{name}").matches().values()}
    for name in ("idx", "bin"):
        if name not in found:
            raise DataError(f"{where}.{name}: no such object")
    key = hashlib.sha256(repr([where, found]).encode()).hexdigest()[:12]
    made = (cache or default_cache()) / f"{where.name}-{key}" / where.name
    if not _named(made, "idx").exists():
        with refusals(made):
            _fetch(where, found, made)
    return made


def default_cache() -> Path:
    """Where copies are that no configuration gives a place to."""
    return Path.home() / ".cache" / "mega" / "data"


def as_given(path: Path) -> str:
    """A path as the user wrote it, if that was a URL."""
    return re.sub(r"^([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])", r"\1://", str(path))


def _named(prefix: Path, name: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{name}")


def _fetch(where: Remote, found: Mapping[str, Stamp], made: Path) -> None:
    folder = partial_folder(made)
    lock = hold(folder, wait=True)
    assert lock is not None
    try:
        with ProgressBar(f"fetching {where}", total=sum(stamp.size for stamp in found.values()), unit="bytes") as bar:
            for name, stamp in found.items():
                if not _named(made, name).exists():  # else fetched by another, which was waited for
                    _copy(Remote(f"{where}.{name}"), folder / name, stamp.size, bar)
        give_names(folder, {name: _named(made, name) for name in found})
        discard(folder)
    finally:
        os.close(lock)


def _copy(source: Remote, target: Path, size: int, bar: ProgressBar) -> None:
    """Fetch what of an object is not there yet."""
    with open(target, "ab") as copy, _open(source) as stream:
        bar.advance(copy.tell())
        stream.seek(copy.tell())
        while block := _read(source, stream):
            copy.write(block)
            bar.advance(len(block))
        if copy.tell() != size:
            raise RemoteError(f"{source}: {copy.tell():,} bytes came of {size:,}", hint="did it change just now?")
        os.fsync(copy.fileno())


def _open(source: Remote) -> IO[bytes]:
    try:
        return source.open()
    except FileNotFoundError as error:
        raise RemoteError(f"{source}: no such object any more", hint="it was listed just now; try again") from error


def _read(source: Remote, stream: IO[bytes]) -> bytes:
    with in_words(source, writing=True):
        return stream.read(BLOCK)
