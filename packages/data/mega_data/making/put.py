"""Token files on an object store: made in files of this machine, and copied there, the index last.

    CACHE/wiki-5f3a1c.../wiki.bin, wiki.idx, ...    until all of it is there

A run that was ended, while it made them or copied them, goes on when it is started again.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from mega_common.errors import DataError
from mega_common.log import ProgressBar
from mega_common.remote import Remote, place
from mega_data.files.fetch import as_given, default_cache
from mega_data.files.indexed import data_prefix

SUFFIXES = (
    "info",
    "quarantine.jsonl",
    "mask.bin",
    "mask.idx",
    "images.bin",
    "images.idx",
    "bin",
    "idx",
)  # whoever finds the index finds the others


def place_of(prefix: Path, *, overwrite: bool) -> Remote | None:
    """Where a data set goes whose prefix is a URL; None for a path.

    Raises:
        DataError: when it is there already, and must not be written over.
        RemoteError: when the object store cannot be asked.
    """
    where = place(as_given(data_prefix(prefix)))
    if not isinstance(where, Remote):
        return None
    if not overwrite and Remote(f"{where}.idx").exists():
        raise DataError(f"{where}.idx: exists already", hint="choose another --output, or say --overwrite")
    return where


def workplace(where: Remote) -> Path:
    """The prefix that a data set is made at before it goes to `where`; its folder is there."""
    key = hashlib.sha256(where.encode()).hexdigest()[:12]
    prefix = default_cache() / "made" / f"{where.name}-{key}" / where.name
    prefix.parent.mkdir(parents=True, exist_ok=True)
    return prefix


def put(prefix: Path, where: Remote) -> None:
    """Copy a data set to an object store, in place of another of that name, and remove it here.

    Raises:
        RemoteError: when the store refuses; all is kept here then.
    """
    files = {name: prefix.with_name(f"{prefix.name}.{name}") for name in SUFFIXES}
    Remote(f"{where}.idx").remove()
    with ProgressBar(
        f"copying to {where}", total=sum(f.stat().st_size for f in files.values() if f.exists()), unit="bytes"
    ) as bar:
        for name, path in files.items():
            target = Remote(f"{where}.{name}")
            if path.exists():
                target.put(path, bar.advance)
            else:
                target.remove()  # of a data set that was written over
    shutil.rmtree(prefix.parent)
