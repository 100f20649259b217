"""A data set of several files that appears as one: a note says that all is there, and whoever finds it gives the names.

    .wiki.partial/ready.json    {"made_from": ..., "obsolete": [...]}: from here on, nothing is made any more
    .wiki.partial/bin ...       become wiki.bin, wiki.quarantine.jsonl, wiki.info and last wiki.idx

So a kill between two renames leaves nothing to do over: the next run of any kind on this name gives the other names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from mega_common.files import fsync_folder, write_json
from mega_data.files.indexed import bin_path, idx_path, names_beside
from mega_data.files.indexed_writer import IndexedWriter, remove_earlier
from mega_data.files.info import forget, info_path, quarantine_path
from mega_data.making.partial import LOCK, discard, give_names, hold, partial_folder, refusals

READY = "ready.json"


def commit(writer: IndexedWriter, made_from: str, obsolete: Iterable[Path] = ()) -> None:
    """Give all that is in the folder of a writer, durable each, its final names, and end the writer.

    `made_from` is told by `settle` after a kill. `obsolete` files are removed when the data set is there.

    Raises:
        DataError: when the disk refuses; nothing is lost then, and `settle` goes on.
    """
    with refusals(writer.prefix):
        write_json(writer.folder / READY, {"made_from": made_from, "obsolete": [str(path) for path in obsolete]})
        try:
            _give_names(writer.prefix)
        finally:
            writer.release()


def settle(prefix: Path) -> str | None:
    """Finish what a kill, in the instant of the names, left undone: what that data set was made from, None for none.

    Raises:
        DataError: when the disk refuses.
    """
    with refusals(prefix):
        return _settle(prefix)


def _settle(prefix: Path) -> str | None:
    folder = partial_folder(prefix)
    left = _left(folder)
    if left is None or (left and READY not in left):
        return None
    lock = hold(folder, wait=READY in left)
    if lock is None:
        return None
    try:
        if (folder / READY).exists():
            return _give_names(prefix)
        if not _left(folder):
            discard(folder)
        return None
    finally:
        os.close(lock)


def _left(folder: Path) -> set[str] | None:
    return {path.name for path in folder.iterdir()} - {LOCK} if folder.is_dir() else None


def _give_names(prefix: Path) -> str:
    folder = partial_folder(prefix)
    note = json.loads((folder / READY).read_bytes())
    if (folder / "bin").exists():
        remove_earlier(prefix)
        forget(prefix)
        fsync_folder(prefix.parent)
    beside = {**names_beside(prefix), "quarantine.jsonl": quarantine_path(prefix), "info": info_path(prefix)}
    give_names(folder, {"bin": bin_path(prefix), **beside, "idx": idx_path(prefix)})
    for name in note["obsolete"]:
        Path(name).unlink(missing_ok=True)
    discard(folder, last=[READY])
    return str(note["made_from"])
