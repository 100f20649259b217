"""Checkpoint folders of a run: atomic commit and removal (a rename on a file system, one put of the manifest on an
object store), listing and retention.

At any time a reader finds each checkpoint either complete or not at all.
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
from mega_ckpt.shard_files import HashingFileWriter
from mega_common.atomic_files import describe_disk_error, fsync_directory
from mega_common.errors import CheckpointError, NoCheckpointError
from mega_common.object_store import Location, ObjectStoreError, RemotePath

_COMMITTED = re.compile(r"step-(\d{8,18})")
_REPLACED = re.compile(r"\.step-(\d{8,18})\.replaced-\w+")
_LEFTOVER = re.compile(r"\.step-\d{8,18}\.(tmp|trash|replaced)-\w+")

P = TypeVar("P", Path, RemotePath, Location)


class CheckpointCommitter(Protocol):
    """Interface for committing and removing the checkpoints below one root folder.
    Each `begin_save` is followed by `discard_save` or `commit_save`, not both.
    """

    def list_candidates(self) -> Sequence[Location]:
        """Return the folders below the root that are named like complete checkpoints, sorted by step."""

    def begin_save(self, step: int) -> Location:
        """Return the folder to write the files of a new checkpoint to; readers ignore it until `commit_save`."""

    def commit_save(self, folder: Location, manifest: Manifest) -> None:
        """Turn a folder from `begin_save`, whose files are all durable, into the checkpoint of the manifest's step.

        An existing checkpoint of the same step is replaced; a reader finds one of the two at any time. After an error the
        folder is removed, unless the commit may have succeeded.
        """

    def discard_save(self, folder: Location) -> None:
        """Remove the folder of an unfinished save, from `begin_save`, as far as possible; errors are ignored."""

    def remove_checkpoint(self, folder: Location) -> None:
        """Remove a complete checkpoint below the root folder."""

    def remove_leftovers(self) -> Sequence[Location]:
        """Remove unfinished saves and half-deleted checkpoints of killed runs, and return their paths.
        Call it only while nothing is being saved.
        """


class RenameCommitter:
    """Committer of checkpoints on a file system, which makes a checkpoint complete by renaming its folder.

        <root>/step-00000100/                   committed: complete and on the disk
        <root>/.step-00000200.tmp-1f9a.../      being written
        <root>/.step-00000100.replaced-.../     committed earlier; `step-00000100` is being replaced
        <root>/.step-00000050.trash-.../        being deleted

    Each change is one rename, which is durable after an fsync of the root.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def list_candidates(self) -> list[Path]:
        """Return the folders below the root that are named like checkpoints, sorted by step.
        A checkpoint that was being replaced counts if its successor is missing.
        """
        found: dict[int, Path] = {}
        # "." sorts before "s": the new checkpoint takes precedence over the one that it replaces.
        for name in sorted(self._list_names()):
            match = _COMMITTED.fullmatch(name) or _REPLACED.fullmatch(name)
            if match and _is_folder(self._root / name):
                found[int(match[1])] = self._root / name
        return [path for _, path in sorted(found.items())]

    def begin_save(self, step: int) -> Location:
        """Create a new hidden folder for the files of the checkpoint of `step` and return it."""
        make_durable_folder(self._root)
        folder = self._hidden_path(step, "tmp")
        os.mkdir(folder)
        return folder

    def commit_save(self, folder: Location, manifest: Manifest) -> None:
        """Write a checkpoint's manifest into its folder, then rename the folder to `step-<step>`.
        After an error the folder is deleted.
        """
        try:
            put_manifest(folder, manifest)
            fsync_directory(self._root / folder.name)
            self._rename(self._root / folder.name, manifest.step)
        except Exception:
            self.discard_save(folder)
            raise

    def _rename(self, new: Path, step: int) -> None:
        final, replaced = get_checkpoint_step_folder(self._root, step), None
        if final.exists():
            replaced = self._hidden_path(step, "replaced")
            os.rename(final, replaced)
            fsync_directory(self._root)
        os.rename(new, final)
        fsync_directory(self._root)
        if replaced:
            self.discard_save(replaced)

    def discard_save(self, folder: Location) -> None:
        """Delete the folder of an unfinished checkpoint save.
        Files that cannot be deleted now (a network file system keeps open ones) are left to `remove_leftovers`.
        """
        shutil.rmtree(self._root / folder.name, ignore_errors=True)

    def remove_checkpoint(self, folder: Location) -> None:
        """Delete a checkpoint: hide it by one durable rename, then delete its files."""
        trash = self._hidden_path(parse_checkpoint_step(folder), "trash")
        os.rename(self._root / folder.name, trash)
        fsync_directory(self._root)
        self.discard_save(trash)

    def remove_leftovers(self) -> list[Path]:
        """Remove unfinished saves and half-deleted checkpoints of killed runs, and return their paths.
        A replaced checkpoint without a successor gets its name back.
        """
        complete = set(self.list_candidates())
        left = [self._root / name for name in self._list_names() if _LEFTOVER.fullmatch(name)]
        left = [path for path in left if path not in complete]
        for path in left:
            shutil.rmtree(path)
        for path in complete:
            if _REPLACED.fullmatch(path.name):
                os.rename(path, get_checkpoint_step_folder(self._root, parse_checkpoint_step(path)))
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
    """Committer of checkpoints on an object store, where a checkpoint is complete once its manifest is uploaded.

        <root>/step-00000100/manifest.json      committed: names the subfolder of its files
        <root>/step-00000100/1f9a.../           its files
        <root>/step-00000100/77c0.../           files of a save in progress, or of a killed one

    The manifest is written last and removed first.
    """

    def __init__(self, root: RemotePath) -> None:
        self._root = root

    def list_candidates(self) -> list[RemotePath]:
        """Return the folders below the root that are named like checkpoints, sorted by step.
        Folders without a manifest are included.
        """
        return sorted(self._folders(), key=parse_checkpoint_step)

    def begin_save(self, step: int) -> Location:
        """Return a new unique path for the files of the checkpoint of `step`; nothing is created."""
        return get_checkpoint_step_folder(self._root, step) / secrets.token_hex(4)

    def commit_save(self, folder: Location, manifest: Manifest) -> None:
        """Upload the manifest, which makes the checkpoint complete, then delete other saves of its step.
        If the reply of the object store is lost, the result is unknown, so the files are kept.
        """
        put_manifest(folder, manifest)
        with contextlib.suppress(ObjectStoreError):
            self._remove_other_saves(get_checkpoint_step_folder(self._root, manifest.step), keep=folder.name)

    def discard_save(self, folder: Location) -> None:
        """Remove all objects of an unfinished save; objects that cannot be deleted now are left to `remove_leftovers`."""
        with contextlib.suppress(ObjectStoreError):
            (self._root / folder.parent.name / folder.name).delete_objects()

    def remove_checkpoint(self, folder: Location) -> None:
        """Remove a checkpoint: the manifest first, then the files."""
        path = self._root / folder.name
        (path / MANIFEST).delete_objects()
        with contextlib.suppress(ObjectStoreError):
            path.delete_objects()

    def remove_leftovers(self) -> list[RemotePath]:
        """Remove step folders without a manifest and files of superseded saves, and return their paths.
        A folder with a damaged manifest is kept for inspection.
        """
        left: list[RemotePath] = []
        for folder in self._folders():
            if not (folder / MANIFEST).is_file():
                folder.delete_objects()
                left.append(folder)
                continue
            try:
                committed = Manifest.read_from_folder(folder).folder
            except CheckpointError:
                continue
            left += self._remove_other_saves(folder, keep=committed)
        return left

    def _folders(self) -> list[RemotePath]:
        return [path for path in self._root.iterdir() if _COMMITTED.fullmatch(path.name)]

    def _remove_other_saves(self, folder: RemotePath, *, keep: str) -> list[RemotePath]:
        """Remove the files of other saves of the same step; none if `keep` is empty, as in a checkpoint copied to the
        store, whose files are next to the manifest.
        """
        others = [path for path in folder.iterdir() if keep and path.name not in (keep, MANIFEST)]
        for path in others:
            path.delete_objects()
        return others


@contextlib.contextmanager
def convert_os_errors_to_checkpoint_errors() -> Iterator[None]:
    """Context manager that converts an OSError that names a file into a one-sentence CheckpointError."""
    try:
        yield
    except OSError as error:
        if not error.filename:
            raise
        message, hint = describe_disk_error(error)
        raise CheckpointError(message, hint=hint) from error


def get_checkpoint_committer(root: Location) -> CheckpointCommitter:
    """Return the object that commits and removes the checkpoints below `root`.
    A `ManifestCommitter` on an object store, else a `RenameCommitter`.
    """
    return ManifestCommitter(root) if isinstance(root, RemotePath) else RenameCommitter(root)


def put_manifest(folder: Location, manifest: Manifest) -> None:
    """Write the manifest of the files in `folder`: into `folder`, or on an object store into its parent, in one put."""
    if isinstance(folder, RemotePath):
        (folder.parent / MANIFEST).write_bytes(manifest.model_copy(update={"folder": folder.name}).encode_json())
        return
    with HashingFileWriter(folder / MANIFEST) as file:
        file.write_hashed(manifest.encode_json())
        file.close()


def get_checkpoint_step_folder(root: P, step: int) -> P:
    """Return the path of the checkpoint of `step`: `<root>/step-<8 digits>`."""
    return root / f"step-{step:08d}"


def parse_checkpoint_step(path: Location) -> int:
    """Return the step number in the name of a checkpoint folder (`step-<8 digits>`)."""
    match = _COMMITTED.search(path.name)
    assert match, f"{path} is not the folder of a checkpoint"
    return int(match[1])


def _is_folder(path: Path) -> bool:
    """Return whether the path is a folder; unlike `Path.is_dir` from Python 3.14 on, raise for a path that cannot be
    accessed (EIO, ESTALE).
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:  # renamed or deleted concurrently
        return False


def _has_files(path: Path) -> bool:
    return path.is_dir() and any(path.iterdir())


def make_durable_folder(folder: Path) -> None:
    """Create a folder and its parents so that they survive a power failure; CheckpointError if it is a file."""
    if not folder.is_dir():
        make_durable_folder(folder.parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not folder.is_dir():
                raise CheckpointError(f"{folder}: must be a folder, not a file") from None
        fsync_directory(folder.parent)


def list_checkpoints(root: Location) -> list[Location]:
    """Return all complete, readable checkpoints below `root`, sorted by step; damaged ones are left out."""
    return [path for path in get_checkpoint_committer(root).list_candidates() if _is_sound(path)]


def latest_checkpoint(root: Location) -> Location | None:
    """Return the checkpoint of the highest step below `root`, None if there is none; a CheckpointError if it is damaged.

    Raises:
        CheckpointError: when the latest one cannot be read or is damaged, on a file system also without a manifest. An older
            one is never used instead, since that would silently lose steps.
    """
    for path in reversed(get_checkpoint_committer(root).list_candidates()):
        try:
            _check_step(path)
        except CheckpointError as error:
            # an object store has files of an unfinished save in place, a file system never; a run may remove it just now
            if isinstance(error, NoCheckpointError) and (isinstance(path, RemotePath) or not _has_files(path)):
                continue
            raise CheckpointError(
                error.message,
                hint=f"it is the latest checkpoint in {root}; to resume from an older one, move {path.name} elsewhere",
            ) from error
        return path
    return None


@convert_os_errors_to_checkpoint_errors()
def delete_old_checkpoints(
    root: Location, *, keep: int | None, keep_every: int | None = None, best: int | None = None
) -> list[Location]:
    """Delete all checkpoints below `root` but the newest `keep`, multiples of `keep_every` and step `best`; return their paths.

    At least one is kept, and with `keep` = None all. Call it on one rank.
    """
    if keep is None:
        return []
    old = list_checkpoints(root)[: -max(keep, 1)]
    deleted = [
        path
        for path in old
        if parse_checkpoint_step(path) != best and not (keep_every and parse_checkpoint_step(path) % keep_every == 0)
    ]
    for path in deleted:
        get_checkpoint_committer(root).remove_checkpoint(path)
    return deleted


def latest_checkpoint_until_step(root: Location, step: int) -> Location | None:
    """Return the complete checkpoint below `root` of the highest step <= `step`, or None if there is none.
    Damaged checkpoints are left out.
    """
    return next((path for path in reversed(list_checkpoints(root)) if parse_checkpoint_step(path) <= step), None)


@convert_os_errors_to_checkpoint_errors()
def delete_checkpoints_after_step(root: Location, step: int) -> list[Location]:
    """Delete the checkpoints below `root` of steps greater than `step`, for a run that rolls back, and return their paths.
    Call it on one rank.
    """
    deleted = [path for path in get_checkpoint_committer(root).list_candidates() if parse_checkpoint_step(path) > step]
    for path in reversed(deleted):  # the latest first, so that the remaining ones are always consecutive
        get_checkpoint_committer(root).remove_checkpoint(path)
    return deleted


@convert_os_errors_to_checkpoint_errors()
def remove_leftovers(root: Location) -> Sequence[Location]:
    """Remove unfinished saves and half-deleted checkpoints of killed runs below `root`, and return their paths.
    Call it on one rank at start, while nothing is being saved.
    """
    return get_checkpoint_committer(root).remove_leftovers()


def _check_step(path: Location) -> None:
    step = Manifest.read_from_folder(path).step
    if step != parse_checkpoint_step(path):
        raise CheckpointError(f"{path}: the folder name conflicts with step {step} in its manifest")


def _is_sound(path: Location) -> bool:
    try:
        _check_step(path)
    except CheckpointError:
        return False
    return True
