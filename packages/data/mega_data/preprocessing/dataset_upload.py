"""Upload of token files to an object store: they are written locally and then copied, the index last.

    CACHE/made/wiki-5f3a1c.../wiki.bin, wiki.idx, ...    until the upload is complete

A run that was interrupted, during preprocessing or upload, resumes when it is started again.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from mega_common.errors import DataError
from mega_common.object_store import RemotePath, parse_location
from mega_common.progress_logging import ProgressBar
from mega_data.token_files.indexed_reader import strip_data_suffix
from mega_data.token_files.remote_copies import default_cache_folder, restore_url_slashes

SUFFIXES = (
    "info",
    "quarantine.jsonl",
    "mask.bin",
    "mask.idx",
    "images.bin",
    "images.idx",
    "bin",
    "idx",
)  # in upload order: when the index exists, all other files do


def resolve_upload_target(prefix: Path, *, overwrite: bool) -> RemotePath | None:
    """Return the object store path of an output data set whose prefix is a URL, None for a local path.

    Raises:
        DataError: if the data set exists and `overwrite` is not set.
        RemoteError: if the object store cannot be read.
    """
    remote = parse_location(restore_url_slashes(strip_data_suffix(prefix)))
    if not isinstance(remote, RemotePath):
        return None
    if not overwrite and RemotePath(f"{remote}.idx").exists():
        raise DataError(f"{remote}.idx: exists already", hint="choose another --output, or pass --overwrite")
    return remote


def create_upload_prefix(remote: RemotePath) -> Path:
    """Create a cache folder in which a data set is built before its upload to an object store; return the prefix in it."""
    key = hashlib.sha256(remote.encode()).hexdigest()[:12]
    prefix = default_cache_folder() / "made" / f"{remote.name}-{key}" / remote.name
    prefix.parent.mkdir(parents=True, exist_ok=True)
    return prefix


def upload_dataset(prefix: Path, remote: RemotePath) -> None:
    """Copy the local data set at `prefix` to `remote`, replacing an existing one, and then remove the local files.

    Raises:
        RemoteError: if the upload fails; the local files are kept.
    """
    files = {name: prefix.with_name(f"{prefix.name}.{name}") for name in SUFFIXES}
    RemotePath(f"{remote}.idx").delete_objects()
    with ProgressBar(
        f"uploading to {remote}", total=sum(f.stat().st_size for f in files.values() if f.exists()), unit="bytes"
    ) as bar:
        for name, path in files.items():
            target = RemotePath(f"{remote}.{name}")
            if path.exists():
                target.upload_file(path, bar.advance)
            else:
                target.delete_objects()  # left by an overwritten data set
    shutil.rmtree(prefix.parent)
