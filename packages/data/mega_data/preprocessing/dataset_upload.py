"""Upload of token files to an object store: they are written locally and then copied, the index last.

    CACHE/wiki-5f3a1c.../wiki.bin, wiki.idx, ...    until all of it is there

A run that was ended, while it made them or copied them, goes on when it is started again.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from mega_common.errors import DataError
from mega_common.object_store import RemotePath, parse_location
from mega_common.progress_logging import ProgressBar
from mega_data.token_files.indexed_reader import strip_data_suffix
from mega_data.token_files.remote_copies import default_cache_folder, restore_url

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


def resolve_upload_target(prefix: Path, *, overwrite: bool) -> RemotePath | None:
    """Return the object store path of a data set whose prefix is a URL; None for a local path.

    Raises:
        DataError: when it is there already, and must not be written over.
        RemoteError: when the object store cannot be asked.
    """
    where = parse_location(restore_url(strip_data_suffix(prefix)))
    if not isinstance(where, RemotePath):
        return None
    if not overwrite and RemotePath(f"{where}.idx").exists():
        raise DataError(f"{where}.idx: exists already", hint="choose another --output, or say --overwrite")
    return where


def create_local_prefix(where: RemotePath) -> Path:
    """Return the local prefix at which a data set is built before its upload to `where`; its folder is created."""
    key = hashlib.sha256(where.encode()).hexdigest()[:12]
    prefix = default_cache_folder() / "made" / f"{where.name}-{key}" / where.name
    prefix.parent.mkdir(parents=True, exist_ok=True)
    return prefix


def upload_dataset(prefix: Path, where: RemotePath) -> None:
    """Copy a data set to an object store, replacing another of that name, and remove the local files.

    Raises:
        RemoteError: when the store refuses; all is kept here then.
    """
    files = {name: prefix.with_name(f"{prefix.name}.{name}") for name in SUFFIXES}
    RemotePath(f"{where}.idx").delete_objects()
    with ProgressBar(
        f"copying to {where}", total=sum(f.stat().st_size for f in files.values() if f.exists()), unit="bytes"
    ) as bar:
        for name, path in files.items():
            target = RemotePath(f"{where}.{name}")
            if path.exists():
                target.upload_file(path, bar.advance)
            else:
                target.delete_objects()  # of a data set that was written over
    shutil.rmtree(prefix.parent)
