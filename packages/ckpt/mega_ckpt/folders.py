"""The folders of a run's checkpoints: which are complete, which is the newest, which go."""

from __future__ import annotations

from collections.abc import Sequence

from mega_ckpt.commits import commits_of, make_durable_folder, step_folder, step_of
from mega_ckpt.manifest import MANIFEST, Manifest
from mega_ckpt.remote import Place
from mega_ckpt.storage import folder_at
from mega_common.errors import CheckpointError

__all__ = ["committed", "latest", "make_durable_folder", "retain", "saved_at", "step_folder", "sweep"]


def committed(root: Place) -> list[Place]:
    """All complete checkpoints below `root`, by step."""
    return [path for path in commits_of(root).candidates() if _is_sound(path)]


def latest(root: Place) -> Place | None:
    """The complete checkpoint of the highest step, or None."""
    return next((path for path in reversed(commits_of(root).candidates()) if _is_sound(path)), None)


def retain(root: Place, *, keep: int | None, keep_every: int | None = None) -> list[Place]:
    """Delete old checkpoints: the newest `keep` stay, and those whose step is a multiple of `keep_every`.

    The newest complete one always stays; `keep=None` keeps all. To be called by one rank. Returns what was deleted.
    """
    if keep is None:
        return []
    old = committed(root)[: -max(keep, 1)]
    gone = [path for path in old if not (keep_every and step_of(path) % keep_every == 0)]
    for path in gone:
        commits_of(root).remove(path)
    return gone


def sweep(root: Place) -> Sequence[Place]:
    """Remove what killed runs left behind below `root`. To be called by one rank at start, while nothing is being saved."""
    return commits_of(root).sweep()


def saved_at(folder: Place) -> float:
    """When a checkpoint became complete, in seconds since 1970."""
    return folder_at(folder).modified(MANIFEST)


def _is_sound(path: Place) -> bool:
    try:
        return Manifest.read(path).step == step_of(path)
    except CheckpointError:
        return False
