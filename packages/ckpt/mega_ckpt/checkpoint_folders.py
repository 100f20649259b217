"""Checkpoint folders of a run: atomic commit and removal (a rename on a file system, one put of the manifest on an
object store), listing and retention.

Between any two operations a reader finds every checkpoint complete or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from mega_ckpt.manifest import MANIFEST, Manifest
from mega_ckpt.shard_files import HashedFile
from mega_common.atomic_files import describe_disk_error, fsync_directory
from mega_common.errors import CheckpointError, NoCheckpointError
from mega_common.object_store import Location, ObjectStoreError, RemotePath

_COMMITTED = re.compile(r"step-(\d{8,18})")
_REPLACED = re.compile(r"\.step-(\d{8,18})\.replaced-\w+")
_LEFTOVER = re.compile(r"\.step-\d{8,18}\.(tmp|trash|replaced)-\w+")

P = TypeVar("P", Path, RemotePath, Location)


class CheckpointCommitter(Protocol):
    """Interface for committing and removing the checkpoints below one root. Each `begin_save` is followed by
    `discard_save` or `commit_save`, not both.
    """

    def list_candidates(self) -> Sequence[Location]:
        """Return the folders named like complete checkpoints, sorted by step."""

    def begin_save(self, step: int) -> Location:
        """Return the folder for the files of a new checkpoint. No reader looks there."""

    def commit_save(self, folder: Location, manifest: Manifest) -> None:
        """Turn a folder, whose files are all durable, into the checkpoint of the manifest's step.

        A checkpoint of the same step that is there already is replaced; at no moment is there neither. After an error
        nothing of it is left, unless it may have come through.
        """

    def discard_save(self, folder: Location) -> None:
        """Remove the folder of an unfinished save, as far as possible."""

    def remove_checkpoint(self, folder: Location) -> None:
        """Remove a complete checkpoint."""

    def remove_leftovers(self) -> Sequence[Location]:
        """Remove the leftovers of killed runs and return their paths. Call it only while nothing is being saved."""


class RenameCommitter:
    """Committer on a file system.

        <root>/step-00000100/                   committed: complete and on the disk
        <root>/.step-00000200.tmp-1f9a.../      being written
        <root>/.step-00000100.replaced-.../     was committed; `step-00000100` is just being saved once more
        <root>/.step-00000050.trash-.../        being deleted

    A name changes in one rename, which is durable after an fsync of the root.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def list_candidates(self) -> list[Path]:
        """Return the folders named like complete checkpoints; a replaced one counts if its successor is missing."""
        found: dict[int, Path] = {}
        # "." sorts before "s": where both are there, the new one wins over the one that it replaces.
        for name in sorted(self._list_names()):
            match = _COMMITTED.fullmatch(name) or _REPLACED.fullmatch(name)
            if match and _is_folder(self._root / name):
                found[int(match[1])] = self._root / name
        return [path for _, path in sorted(found.items())]

    def begin_save(self, step: int) -> Location:
        """Create a new hidden folder."""
        make_durable_folder(self._root)
        folder = self._hidden_path(step, "tmp")
        os.mkdir(folder)
        return folder

    def commit_save(self, folder: Location, manifest: Manifest) -> None:
        """Write the manifest, then rename the folder."""
        try:
            put_manifest(folder, manifest)
            fsync_directory(self._root / folder.name)
            self._rename(self._root / folder.name, manifest.step)
        except Exception:
            self.discard_save(folder)
            raise

    def _rename(self, new: Path, step: int) -> None:
        final, replaced = step_folder(self._root, step), None
        if final.exists():
            replaced = self._hidden_path(step, "replaced")
            os.rename(final, replaced)
            fsync_directory(self._root)
        os.rename(new, final)
        fsync_directory(self._root)
        if replaced:
            self.discard_save(replaced)

    def discard_save(self, folder: Location) -> None:
        """Delete the folder; files that cannot be deleted now (a network file system keeps open ones) are left to
        `remove_leftovers`.
        """
        shutil.rmtree(self._root / folder.name, ignore_errors=True)

    def remove_checkpoint(self, folder: Location) -> None:
        """Hide the checkpoint by one durable rename, then delete its files."""
        trash = self._hidden_path(step_from_path(folder), "trash")
        os.rename(self._root / folder.name, trash)
        fsync_directory(self._root)
        self.discard_save(trash)

    def remove_leftovers(self) -> list[Path]:
        """Remove the leftovers of killed runs; a replaced checkpoint without a successor gets its name back."""
        complete = set(self.list_candidates())
        left = [self._root / name for name in self._list_names() if _LEFTOVER.fullmatch(name)]
        left = [path for path in left if path not in complete]
        for path in left:
            shutil.rmtree(path)
        for path in complete:
            if _REPLACED.fullmatch(path.name):
                os.rename(path, step_folder(self._root, step_from_path(path)))
                fsync_directory(self._root)
        return left

    def _list_names(self) -> list[str]:
        """Return the names in the root; a missing root is empty, any other error is raised."""
        try:
            return os.listdir(self._root)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _hidden_path(self, step: int, kind: str) -> Path:
        return self._root / f".step-{step:08d}.{kind}-{secrets.token_hex(4)}"


class ManifestCommitter:
    """Committer on an object store, which has no rename but puts an object atomically.

        <root>/step-00000100/manifest.json      committed: names the folder below that holds its files
        <root>/step-00000100/1f9a.../           its files
        <root>/step-00000100/77c0.../           files of a save that goes on, or was killed

    A checkpoint is there as soon as its manifest is, which is put last and goes first.
    """

    def __init__(self, root: RemotePath) -> None:
        self._root = root

    def list_candidates(self) -> list[RemotePath]:
        """Return the folders named like checkpoints, with or without a manifest."""
        return sorted(self._folders(), key=step_from_path)

    def begin_save(self, step: int) -> Location:
        """Return a new unique name; nothing is created."""
        return step_folder(self._root, step) / secrets.token_hex(4)

    def commit_save(self, folder: Location, manifest: Manifest) -> None:
        """Put the manifest. If the reply is lost, the result is unknown, so the files stay."""
        put_manifest(folder, manifest)
        with contextlib.suppress(ObjectStoreError):
            self._remove_other_saves(step_folder(self._root, manifest.step), keep=folder.name)

    def discard_save(self, folder: Location) -> None:
        """Remove all objects below the folder; objects that cannot be deleted now are left to `remove_leftovers`."""
        with contextlib.suppress(ObjectStoreError):
            (self._root / folder.parent.name / folder.name).delete_objects()

    def remove_checkpoint(self, folder: Location) -> None:
        """Remove the manifest first, then the files."""
        gone = self._root / folder.name
        (gone / MANIFEST).delete_objects()
        with contextlib.suppress(ObjectStoreError):
            gone.delete_objects()

    def remove_leftovers(self) -> list[RemotePath]:
        """Remove folders without a manifest and superseded files; a folder with a damaged manifest is kept for
        inspection.
        """
        left: list[RemotePath] = []
        for folder in self._folders():
            if not (folder / MANIFEST).is_file():
                folder.delete_objects()
                left.append(folder)
                continue
            try:
                held = Manifest.read_from_folder(folder).folder
            except CheckpointError:
                continue
            left += self._remove_other_saves(folder, keep=held)
        return left

    def _folders(self) -> list[RemotePath]:
        return [place for place in self._root.iterdir() if _COMMITTED.fullmatch(place.name)]

    def _remove_other_saves(self, folder: RemotePath, *, keep: str) -> list[RemotePath]:
        """Remove the files of other saves of the same step. A checkpoint copied here has its files next to the
        manifest.
        """
        others = [place for place in folder.iterdir() if keep and place.name not in (keep, MANIFEST)]
        for place in others:
            place.delete_objects()
        return others


@contextlib.contextmanager
def wrap_disk_errors() -> Iterator[None]:
    """Convert an OSError that names a file into a one-sentence CheckpointError."""
    try:
        yield
    except OSError as error:
        if not error.filename:
            raise
        message, hint = describe_disk_error(error)
        raise CheckpointError(message, hint=hint) from error


def committer_for(root: Location) -> CheckpointCommitter:
    """Return the committer for the checkpoints below `root`."""
    return ManifestCommitter(root) if isinstance(root, RemotePath) else RenameCommitter(root)


def put_manifest(folder: Location, manifest: Manifest) -> None:
    """Write the manifest of the files in `folder`: next to them, or on an object store above them, in one put."""
    if isinstance(folder, RemotePath):
        (folder.parent / MANIFEST).write_bytes(manifest.model_copy(update={"folder": folder.name}).encode_json())
        return
    with HashedFile(folder / MANIFEST) as file:
        file.write_hashed(manifest.encode_json())
        file.close()


def step_folder(root: P, step: int) -> P:
    """Return the path of the checkpoint of `step`."""
    return root / f"step-{step:08d}"


def step_from_path(path: Location) -> int:
    """Return the step in the name of a checkpoint folder."""
    match = _COMMITTED.search(path.name)
    assert match, f"{path} is not the folder of a checkpoint"
    return int(match[1])


def _is_folder(path: Path) -> bool:
    """Return whether the path is a folder; unlike `Path.is_dir` from Python 3.14 on, raise for a path that cannot be
    accessed (EIO, ESTALE).
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:  # renamed or deleted just now
        return False


def make_durable_folder(folder: Path) -> None:
    """Create a folder and its parents so that they survive a power failure."""
    if not folder.is_dir():
        make_durable_folder(folder.parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not folder.is_dir():
                raise CheckpointError(f"{folder}: is a file, where a folder of checkpoints should be") from None
        fsync_directory(folder.parent)


def list_checkpoints(root: Location) -> list[Location]:
    """Return all complete, readable checkpoints below `root`, sorted by step."""
    return [path for path in committer_for(root).list_candidates() if _is_sound(path)]


def latest_checkpoint(root: Location) -> Location | None:
    """Return the complete checkpoint of the highest step, or None if there is none.

    Raises:
        CheckpointError: when the newest one cannot be read or is damaged. An older one in its place would be steps lost
            without a word.
    """
    for path in reversed(committer_for(root).list_candidates()):
        try:
            _check_step(path)
        except NoCheckpointError:  # a folder without a manifest: never complete, or just being deleted
            continue
        except CheckpointError as error:
            raise CheckpointError(
                error.message,
                hint=f"it is the newest checkpoint in {root}; to do without it, move {path.name} away from there",
            ) from error
        return path
    return None


@wrap_disk_errors()
def apply_retention(
    root: Location, *, keep: int | None, keep_every: int | None = None, best: int | None = None
) -> list[Location]:
    """Delete old checkpoints: keep the newest `keep`, those whose step is a multiple of `keep_every`, and the one of
    step `best`.

    The newest complete one always stays; `keep=None` keeps all. To be called by one rank. Returns what was deleted.
    """
    if keep is None:
        return []
    old = list_checkpoints(root)[: -max(keep, 1)]
    gone = [
        path
        for path in old
        if step_from_path(path) != best and not (keep_every and step_from_path(path) % keep_every == 0)
    ]
    for path in gone:
        committer_for(root).remove_checkpoint(path)
    return gone


def latest_until_step(root: Location, step: int) -> Location | None:
    """Return the complete checkpoint of the highest step <= `step`, or None if there is none."""
    return next((path for path in reversed(list_checkpoints(root)) if step_from_path(path) <= step), None)


@wrap_disk_errors()
def delete_after_step(root: Location, step: int) -> list[Location]:
    """Delete the checkpoints after `step`, for a run that rolls back; returns their paths. Call it on one rank."""
    gone = [path for path in committer_for(root).list_candidates() if step_from_path(path) > step]
    for path in reversed(gone):  # the newest first: whoever looks meanwhile finds a checkpoint of the same run
        committer_for(root).remove_checkpoint(path)
    return gone


@wrap_disk_errors()
def remove_leftovers(root: Location) -> Sequence[Location]:
    """Remove the leftovers of killed runs below `root`. Call it on one rank at start, while nothing is being saved."""
    return committer_for(root).remove_leftovers()


def _check_step(path: Location) -> None:
    step = Manifest.read_from_folder(path).step
    if step != step_from_path(path):
        raise CheckpointError(f"{path}: its manifest says that it is the checkpoint of step {step}")


def _is_sound(path: Location) -> bool:
    try:
        _check_step(path)
    except CheckpointError:
        return False
    return True
