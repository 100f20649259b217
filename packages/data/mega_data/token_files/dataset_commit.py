"""Atomic commit of a data set of several files: a note marks it complete, and any later run finishes the renames.

    .wiki.partial/ready.json    {"made_from": ..., "obsolete": [...]}: all files are complete
    .wiki.partial/bin ...       become wiki.bin, wiki.quarantine.jsonl, wiki.info and last wiki.idx

A kill between two renames loses no work: the next run that uses this prefix finishes the renames.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from mega_common.atomic_files import fsync_directory, write_json_atomically
from mega_data.token_files.dataset_info import get_info_path, get_quarantine_path, remove_dataset_info
from mega_data.token_files.indexed_reader import get_bin_path, get_idx_path, list_companion_files
from mega_data.token_files.indexed_writer import IndexedWriter, remove_earlier_index
from mega_data.token_files.partial_folder import (
    LOCK,
    convert_write_errors_to_data_error,
    get_partial_folder,
    lock_partial_folder,
    move_files_durably,
    remove_partial_folder,
)

READY = "ready.json"


def commit_dataset(writer: IndexedWriter, made_from: str, obsolete: Iterable[Path] = ()) -> None:
    """Commit a written data set: rename its complete files to their final names, and release the writer.
    After a kill, `finish_interrupted_commit` completes this and returns `made_from`, a digest of the inputs. `obsolete` files are
    removed after the renames.

    Raises:
        DataError: if a file cannot be written or renamed; nothing is lost, and `finish_interrupted_commit` completes the commit.
    """
    with convert_write_errors_to_data_error(writer.prefix):
        write_json_atomically(
            writer.folder / READY, {"made_from": made_from, "obsolete": [str(path) for path in obsolete]}
        )
        try:
            _rename_committed(writer.prefix)
        finally:
            writer.release_lock()


def finish_interrupted_commit(prefix: Path) -> str | None:
    """Finish the renames of a killed `commit_dataset`; return the digest of its inputs, or None if none was pending.
    The digest is `made_from`, as that run gave it.

    Raises:
        DataError: if a file cannot be renamed.
    """
    with convert_write_errors_to_data_error(prefix):
        return _finish_commit(prefix)


def _finish_commit(prefix: Path) -> str | None:
    folder = get_partial_folder(prefix)
    files = _list_partial_files(folder)
    if files is None or (files and READY not in files):
        return None
    lock = lock_partial_folder(folder, wait=READY in files)
    if lock is None:
        return None
    try:
        if (folder / READY).exists():
            return _rename_committed(prefix)
        if not _list_partial_files(folder):
            remove_partial_folder(folder)
        return None
    finally:
        os.close(lock)


def _list_partial_files(folder: Path) -> set[str] | None:
    return {path.name for path in folder.iterdir()} - {LOCK} if folder.is_dir() else None


def _rename_committed(prefix: Path) -> str:
    folder = get_partial_folder(prefix)
    note = json.loads((folder / READY).read_bytes())
    if (folder / "bin").exists():
        remove_earlier_index(prefix)
        remove_dataset_info(prefix)
        fsync_directory(prefix.parent)
    companions = {
        **list_companion_files(prefix),
        "quarantine.jsonl": get_quarantine_path(prefix),
        "info": get_info_path(prefix),
    }
    move_files_durably(folder, {"bin": get_bin_path(prefix), **companions, "idx": get_idx_path(prefix)})
    for name in note["obsolete"]:
        Path(name).unlink(missing_ok=True)
    remove_partial_folder(folder, last=[READY])
    return str(note["made_from"])
