"""The folders of a run's checkpoints: which are complete, which is the newest, which go."""

from __future__ import annotations

from collections.abc import Sequence

from mega_ckpt.commits import commits_of, disk_errors, make_durable_folder, step_folder, step_of
from mega_ckpt.manifest import Manifest
from mega_common.errors import CheckpointError, NoCheckpointError
from mega_common.remote import Place

__all__ = [
    "committed", "forget_after", "latest", "make_durable_folder", "newest_until", "retain", "step_folder", "sweep",
]  # fmt: skip


def committed(root: Place) -> list[Place]:
    """All complete checkpoints below `root` that can be read, by step."""
    return [path for path in commits_of(root).candidates() if _is_sound(path)]


def latest(root: Place) -> Place | None:
    """The complete checkpoint of the highest step, or None when there is none.

    Raises:
        CheckpointError: when the newest one cannot be read or is damaged. An older one in its place would be steps lost
            without a word.
    """
    for path in reversed(commits_of(root).candidates()):
        try:
            _check(path)
        except NoCheckpointError:  # a folder without a manifest: never complete, or just being deleted
            continue
        except CheckpointError as error:
            raise CheckpointError(
                error.message,
                hint=f"it is the newest checkpoint in {root}; to do without it, move {path.name} away from there",
            ) from error
        return path
    return None


@disk_errors()
def retain(root: Place, *, keep: int | None, keep_every: int | None = None, best: int | None = None) -> list[Place]:
    """Delete old checkpoints: the newest `keep` stay, those whose step is a multiple of `keep_every`, and that of step `best`.

    The newest complete one always stays; `keep=None` keeps all. To be called by one rank. Returns what was deleted.
    """
    if keep is None:
        return []
    old = committed(root)[: -max(keep, 1)]
    gone = [path for path in old if step_of(path) != best and not (keep_every and step_of(path) % keep_every == 0)]
    for path in gone:
        commits_of(root).remove(path)
    return gone


def newest_until(root: Place, step: int) -> Place | None:
    """The complete checkpoint of the highest step that is not after `step`, or None when there is none."""
    return next((path for path in reversed(committed(root)) if step_of(path) <= step), None)


@disk_errors()
def forget_after(root: Place, step: int) -> list[Place]:
    """Delete the checkpoints of later steps, as of a run that goes back. To be called by one rank. Returns what was deleted."""
    gone = [path for path in commits_of(root).candidates() if step_of(path) > step]
    for path in reversed(gone):  # the newest first: whoever looks meanwhile finds a checkpoint of the same run
        commits_of(root).remove(path)
    return gone


@disk_errors()
def sweep(root: Place) -> Sequence[Place]:
    """Remove what killed runs left behind below `root`. To be called by one rank at start, while nothing is being saved."""
    return commits_of(root).sweep()


def _check(path: Place) -> None:
    step = Manifest.read(path).step
    if step != step_of(path):
        raise CheckpointError(f"{path}: its manifest says that it is the checkpoint of step {step}")


def _is_sound(path: Place) -> bool:
    try:
        _check(path)
    except CheckpointError:
        return False
    return True
