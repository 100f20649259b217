"""How a checkpoint becomes one of a run's, and how it stops being one: by a rename on a file system, by a put elsewhere.

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
from mega_ckpt.shards import NewFile
from mega_common.errors import CheckpointError
from mega_common.files import fsync_folder
from mega_common.full_disk import HINT, full_disk
from mega_common.remote import Place, Remote, RemoteError

_COMMITTED = re.compile(r"step-(\d{8,18})")
_REPLACED = re.compile(r"\.step-(\d{8,18})\.replaced-\w+")
_LEFTOVER = re.compile(r"\.step-\d{8,18}\.(tmp|trash|replaced)-\w+")

P = TypeVar("P", Path, Remote, Place)


class Commits(Protocol):
    """The checkpoints below one root. After `begin` comes `discard` or `commit`, not both."""

    def candidates(self) -> Sequence[Place]:
        """Folders that have the name of a complete checkpoint, by step."""

    def begin(self, step: int) -> Place:
        """Where the files of a new checkpoint go. No reader looks there."""

    def commit(self, folder: Place, manifest: Manifest) -> None:
        """Turn it, all of whose files are durable, into the checkpoint of the manifest's step.

        A checkpoint of the same step that is there already is replaced; at no moment is there neither. After an error
        nothing of it is left, unless it may have come through.
        """

    def discard(self, folder: Place) -> None:
        """Remove it, as far as that is possible now."""

    def remove(self, folder: Place) -> None:
        """Remove a complete checkpoint."""

    def sweep(self) -> Sequence[Place]:
        """Remove what killed runs left behind; returns it. To be called while nothing is being saved."""


class ByRename:
    """On a file system.

        <root>/step-00000100/                   committed: complete and on the disk
        <root>/.step-00000200.tmp-1f9a.../      being written
        <root>/.step-00000100.replaced-.../     was committed; `step-00000100` is just being saved once more
        <root>/.step-00000050.trash-.../        being deleted

    A name changes in one rename, which is durable after an fsync of the root.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def candidates(self) -> list[Path]:
        """Replaced ones too, where the new one is not there."""
        found: dict[int, Path] = {}
        # "." sorts before "s": where both are there, the new one wins over the one that it replaces.
        for name in sorted(self._names()):
            match = _COMMITTED.fullmatch(name) or _REPLACED.fullmatch(name)
            if match and _is_folder(self._root / name):
                found[int(match[1])] = self._root / name
        return [path for _, path in sorted(found.items())]

    def begin(self, step: int) -> Place:
        """A new hidden folder."""
        make_durable_folder(self._root)
        folder = self._hidden(step, "tmp")
        os.mkdir(folder)
        return folder

    def commit(self, folder: Place, manifest: Manifest) -> None:
        """The manifest, then the rename."""
        try:
            put_manifest(folder, manifest)
            fsync_folder(self._root / folder.name)
            self._rename(self._root / folder.name, manifest.step)
        except Exception:
            self.discard(folder)
            raise

    def _rename(self, new: Path, step: int) -> None:
        final, replaced = step_folder(self._root, step), None
        if final.exists():
            replaced = self._hidden(step, "replaced")
            os.rename(final, replaced)
            fsync_folder(self._root)
        os.rename(new, final)
        fsync_folder(self._root)
        if replaced:
            self.discard(replaced)

    def discard(self, folder: Place) -> None:
        """What cannot be deleted now (a network file system keeps what someone still reads) is left to `sweep`."""
        shutil.rmtree(self._root / folder.name, ignore_errors=True)

    def remove(self, folder: Place) -> None:
        """Out of sight in one rename, and durably so, before anything inside is deleted."""
        trash = self._hidden(step_of(folder), "trash")
        os.rename(self._root / folder.name, trash)
        fsync_folder(self._root)
        self.discard(trash)

    def sweep(self) -> list[Path]:
        """A checkpoint that was to be replaced, and was not, gets its name back."""
        complete = set(self.candidates())
        left = [self._root / name for name in self._names() if _LEFTOVER.fullmatch(name)]
        left = [path for path in left if path not in complete]
        for path in left:
            shutil.rmtree(path)
        for path in complete:
            if _REPLACED.fullmatch(path.name):
                os.rename(path, step_folder(self._root, step_of(path)))
                fsync_folder(self._root)
        return left

    def _names(self) -> list[str]:
        """What cannot be listed for another reason is an error: it is not empty."""
        try:
            return os.listdir(self._root)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _hidden(self, step: int, kind: str) -> Path:
        return self._root / f".step-{step:08d}.{kind}-{secrets.token_hex(4)}"


class ByManifest:
    """On an object store, which cannot rename, but puts an object whole.

        <root>/step-00000100/manifest.json      committed: names the folder below that holds its files
        <root>/step-00000100/1f9a.../           its files
        <root>/step-00000100/77c0.../           files of a save that goes on, or was killed

    A checkpoint is there as soon as its manifest is, which is put last and goes first.
    """

    def __init__(self, root: Remote) -> None:
        self._root = root

    def candidates(self) -> list[Remote]:
        """With or without a manifest."""
        return sorted(self._folders(), key=step_of)

    def begin(self, step: int) -> Place:
        """A new name; there is nothing to be made."""
        return step_folder(self._root, step) / secrets.token_hex(4)

    def commit(self, folder: Place, manifest: Manifest) -> None:
        """One put. When its answer is lost, nobody knows whether it came through, so the files stay."""
        put_manifest(folder, manifest)
        with contextlib.suppress(RemoteError):
            self._clear(step_folder(self._root, manifest.step), keep=folder.name)

    def discard(self, folder: Place) -> None:
        """All objects below. What the store does not delete now is left to `sweep`."""
        with contextlib.suppress(RemoteError):
            (self._root / folder.parent.name / folder.name).remove()

    def remove(self, folder: Place) -> None:
        """The manifest first."""
        gone = self._root / folder.name
        (gone / MANIFEST).remove()
        with contextlib.suppress(RemoteError):
            gone.remove()

    def sweep(self) -> list[Remote]:
        """A folder whose manifest is there, but damaged, is left for somebody to look at."""
        left: list[Remote] = []
        for folder in self._folders():
            if not (folder / MANIFEST).is_file():
                folder.remove()
                left.append(folder)
                continue
            try:
                held = Manifest.read(folder).folder
            except CheckpointError:
                continue
            left += self._clear(folder, keep=held)
        return left

    def _folders(self) -> list[Remote]:
        return [place for place in self._root.iterdir() if _COMMITTED.fullmatch(place.name)]

    def _clear(self, folder: Remote, *, keep: str) -> list[Remote]:
        """Remove the files of other saves of the same step. A checkpoint that was copied here has its own beside the manifest."""
        others = [place for place in folder.iterdir() if keep and place.name not in (keep, MANIFEST)]
        for place in others:
            place.remove()
        return others


@contextlib.contextmanager
def disk_errors() -> Iterator[None]:
    """Turn an OSError that names a file into a CheckpointError of one sentence."""
    try:
        yield
    except OSError as error:
        if not error.filename:
            raise
        message, _ = describe_disk_error(error)
        raise CheckpointError(message, hint=HINT if full_disk(error) else None) from error


def describe_disk_error(error: OSError) -> tuple[str, str | None]:
    """Return the sentence and the hint for an OSError that names a file."""
    hint = "free space there, or keep fewer (checkpoint.keep)" if full_disk(error) else None
    return f"{error.filename}: {error.strerror}", hint


def commits_of(root: Place) -> Commits:
    """How checkpoints below `root` come and go."""
    return ByManifest(root) if isinstance(root, Remote) else ByRename(root)


def put_manifest(folder: Place, manifest: Manifest) -> None:
    """Write the manifest of the files in `folder`: beside them, or on an object store above them, in one put."""
    if isinstance(folder, Remote):
        (folder.parent / MANIFEST).write_bytes(manifest.model_copy(update={"folder": folder.name}).encode())
        return
    with NewFile(folder / MANIFEST) as file:
        file.write(manifest.encode())
        file.close()


def step_folder(root: P, step: int) -> P:
    """Where the checkpoint of `step` is."""
    return root / f"step-{step:08d}"


def step_of(path: Place) -> int:
    """The step that the name of a checkpoint's folder tells."""
    match = _COMMITTED.search(path.name)
    assert match, f"{path} is not the folder of a checkpoint"
    return int(match[1])


def _is_folder(path: Path) -> bool:
    """As `Path.is_dir`, which takes a path that cannot be looked at (EIO, ESTALE) for none from Python 3.14 on."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:  # renamed or deleted just now
        return False


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
