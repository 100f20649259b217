"""The folders of a run's checkpoints: which are committed, how one becomes so, how old ones go.

    <root>/step-00000100/                   committed: complete and on the disk
    <root>/.step-00000200.tmp-1f9a.../      being written
    <root>/.step-00000100.replaced-.../     was committed; `step-00000100` is just being saved once more
    <root>/.step-00000050.trash-.../        being deleted

A name changes in one rename, which is durable after an fsync of the root; between any two operations a reader finds every
checkpoint complete or not at all.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from mega_ckpt.manifest import Manifest
from mega_common.errors import CheckpointError
from mega_common.files import fsync_folder

_COMMITTED = re.compile(r"step-(\d{8,18})")
_REPLACED = re.compile(r"\.step-(\d{8,18})\.replaced-\w+")
_LEFTOVER = re.compile(r"\.step-\d{8,18}\.(tmp|trash|replaced)-\w+")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is."""
    return root / f"step-{step:08d}"


def committed(root: Path) -> list[Path]:
    """All complete checkpoints below `root`, by step."""
    return [path for path in candidates(root) if _is_sound(path)]


def latest(root: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    return next((path for path in reversed(candidates(root)) if _is_sound(path)), None)


def candidates(root: Path) -> list[Path]:
    """Folders that have the name of a complete checkpoint, by step."""
    found: dict[int, Path] = {}
    names = sorted(os.listdir(root)) if root.is_dir() else []
    # "." sorts before "s": where both are there, the new one wins over the one that it replaces.
    for name in names:
        match = _COMMITTED.fullmatch(name) or _REPLACED.fullmatch(name)
        if match and (root / name).is_dir():
            found[int(match[1])] = root / name
    return [path for _, path in sorted(found.items())]


def make_temporary(root: Path, step: int) -> Path:
    """A new folder for the checkpoint of `step` to be written in."""
    make_durable_folder(root)
    folder = _hidden(root, step, "tmp")
    os.mkdir(folder)
    return folder


def make_durable_folder(folder: Path) -> None:
    """Make a folder, and those above it, so that they are there after a power cut."""
    if not folder.is_dir():
        make_durable_folder(folder.parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not folder.is_dir():
                raise CheckpointError(f"{folder}: is a file, where a folder of checkpoints should be") from None
        fsync_folder(folder.parent)


def commit(temporary: Path, root: Path, step: int) -> Path:
    """Turn a temporary folder, all of whose content is on the disk, into the checkpoint of `step`.

    A checkpoint of the same step that is there already is replaced; at no moment is there neither.
    """
    final = step_folder(root, step)
    replaced = None
    if final.exists():
        replaced = _hidden(root, step, "replaced")
        os.rename(final, replaced)
        fsync_folder(root)
    os.rename(temporary, final)
    fsync_folder(root)
    if replaced:
        _remove(replaced)
    return final


def retain(root: Path, *, keep: int | None, keep_every: int | None = None) -> list[Path]:
    """Delete old checkpoints: the newest `keep` stay, and those whose step is a multiple of `keep_every`.

    The newest complete one always stays; `keep=None` keeps all. To be called by one rank. Returns what was deleted.
    """
    if keep is None:
        return []
    old = committed(root)[: -max(keep, 1)]
    gone = [path for path in old if not (keep_every and _step_of(path) % keep_every == 0)]
    for path in gone:
        trash = _hidden(root, _step_of(path), "trash")
        os.rename(path, trash)
        # Before anything inside is deleted: half a checkpoint must not be found under a committed name.
        fsync_folder(root)
        _remove(trash)
    return gone


def sweep(root: Path) -> list[Path]:
    """Remove what killed runs left behind below `root`. To be called by one rank at start, while nothing is being saved."""
    complete = set(candidates(root))
    names = os.listdir(root) if root.is_dir() else []
    left = [root / name for name in names if _LEFTOVER.fullmatch(name) and root / name not in complete]
    for path in left:
        shutil.rmtree(path)
    for path in complete:
        if _REPLACED.fullmatch(path.name):
            os.rename(path, step_folder(root, _step_of(path)))
            fsync_folder(root)
    return left


def _remove(folder: Path) -> None:
    # What cannot be deleted now (a network file system keeps what someone still reads) is left to `sweep`.
    shutil.rmtree(folder, ignore_errors=True)


def _hidden(root: Path, step: int, kind: str) -> Path:
    return root / f".step-{step:08d}.{kind}-{secrets.token_hex(4)}"


def _step_of(path: Path) -> int:
    match = _COMMITTED.search(path.name)
    assert match, f"{path} is not the folder of a checkpoint"
    return int(match[1])


def _is_sound(path: Path) -> bool:
    try:
        return Manifest.read(path).step == _step_of(path)
    except CheckpointError:
        return False
