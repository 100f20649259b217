"""Save and load: the door of the checkpoint store.

A save writes where no reader looks and commits in one operation, after every rank's files are durable: a rename on a file
system, the put of the manifest on an object store. Killed at any moment, it leaves the former checkpoints as they were, or
the new one complete.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from mega_ckpt.checkpoint import Checkpoint
from mega_ckpt.commits import commits_of, describe_disk_error
from mega_ckpt.folders import committed, latest, retain, step_folder, sweep
from mega_ckpt.manifest import DTYPE_NAMES, FileEntry, Manifest, TensorEntry, make_manifest
from mega_ckpt.pieces import Sharded
from mega_ckpt.planning import Loading, Reader, Saving, Writer, Written
from mega_ckpt.shards import NewFile
from mega_ckpt.staging import Staging
from mega_ckpt.storage import folder_at
from mega_common.errors import CheckpointError, MegaError
from mega_common.log import ProgressBar, logger
from mega_common.model_config import ModelConfig
from mega_common.remote import Place, Remote, place

__all__ = [
    "AsyncSaver", "Checkpoint", "Place", "Remote", "committed", "latest", "load", "place", "retain", "save", "step_folder",
    "sweep",
]  # fmt: skip

T = TypeVar("T")


def save(
    root: Place,
    step: int,
    tensors: Mapping[str, Sharded],
    *,
    model: ModelConfig,
    state: Mapping[str, Any],
    assets: Path | None = None,
    group: dist.ProcessGroup | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Place:
    """Save a checkpoint to `<root>/step-<step>`; when it returns, it is durable and complete, on every rank.

    The boxes of all ranks together must tile each tensor; several ranks may hold the same box, which is written once. A
    checkpoint of the same step is replaced. `state`, `assets` (a folder, copied whole) and `provenance` are taken from
    the group's first rank.

    Raises:
        CheckpointError: the same on every rank, when any rank cannot do its part. Nothing is left behind then.
    """
    with _progress(f"saving step {step}", group) as advance:
        _save(lambda: tensors, _Target(root, step, model, state, assets, provenance), group, advance)
    return step_folder(root, step)


@dataclass
class _Target:
    """The folder that a save fills; made, completed and committed by the group's first rank."""

    root: Place
    step: int
    model: ModelConfig
    state: Mapping[str, Any]
    assets: Path | None
    provenance: Mapping[str, Any] | None
    folder: Place | None = None
    begun: float = field(default_factory=time.perf_counter)

    def begin(self) -> Place:
        """Make the folder, unless what is to be saved cannot be described."""
        make_manifest(self.step, self.model, self.state, self.provenance)
        if self.assets and not self.assets.is_dir():
            raise CheckpointError(f"{self.assets}: no such folder, though its files should go into the checkpoint")
        self.folder = commits_of(self.root).begin(self.step)
        return self.folder

    def finish(self, written: list[Written]) -> None:
        """Add what is not tensors, and commit. Every rank's shards are durable."""
        assert self.folder is not None
        files = _copy_assets(self.assets, self.folder) if self.assets else {}
        manifest = make_manifest(self.step, self.model, self.state, self.provenance)
        folder, self.folder = self.folder, None
        commits_of(self.root).commit(folder, _described(manifest, written, files))
        logger.info(
            "saved step %d in %.1f s: %s",
            self.step,
            time.perf_counter() - self.begun,
            step_folder(self.root, self.step),
        )

    def discard(self) -> None:
        """Remove the folder, unless it was to be committed already."""
        if self.folder is not None:
            commits_of(self.root).discard(self.folder)


def _save(
    tensors: Callable[[], Mapping[str, Sharded]],
    target: _Target,
    group: dist.ProcessGroup | None,
    advance: Callable[[int], None],
) -> None:
    try:
        with _told_alike(group):
            writer, planner = Writer(target, advance), Saving(tensors)
            dcp_save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=not _distributed())
    except CheckpointError as error:
        # Only after DCP's own error it is certain that no rank writes any more.
        if isinstance(error.__cause__, CheckpointException):
            target.discard()
        raise


def load(
    folder: Place, tensors: Mapping[str, Sharded], *, group: dist.ProcessGroup | None = None, verify: bool = True
) -> None:
    """Fill boxes from a checkpoint, in place. Each rank gives the boxes that it wants; tensors left out are not read.

    With `verify`, every chunk that is touched is compared with its checksum. Nothing is cast.

    Raises:
        CheckpointError: the same on every rank, when a tensor is missing, has another shape or dtype, or is damaged.
            The boxes' content is undefined then.
    """
    size = sum(box.tensor.nbytes for sharded in tensors.values() for box in sharded.boxes)
    with _told_alike(group), _progress(f"loading {folder.name}", group, size) as advance:
        reader, planner = Reader(folder, list(tensors), advance, verify=verify), Loading(folder, tensors)
        dcp_load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=not _distributed())


class Stall(NamedTuple):
    """Seconds that a save held up its caller: waiting for the former save to end, and copying."""

    waiting: float
    copying: float


class AsyncSaver:
    """Saves while the caller goes on: copies the boxes to host memory, then a thread writes them. One save at a time.

    The thread's collectives need a process group of their own; with torch.distributed, constructing a saver makes one
    (gloo), so every rank must do so. An error of the thread is raised by the next `start` or by `wait`, on every rank.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if _distributed() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._folder: Place | None = None
        self._staging = Staging()

    def start(
        self,
        root: Place,
        step: int,
        tensors: Mapping[str, Sharded],
        *,
        model: ModelConfig,
        state: Mapping[str, Any],
        assets: Path | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Stall:
        """Begin a save as `save` does; when this returns, `tensors` and `state` may change.

        Raises:
            CheckpointError: when the former save failed. The new one is not begun then.
        """
        begun = time.perf_counter()
        self.wait()
        waited = time.perf_counter()
        staged = _outcome(lambda: self._staging.copy(tensors))
        target = _Target(root, step, model, copy.deepcopy(dict(state)), assets, copy.deepcopy(provenance))
        self._running = self._thread.submit(_save, staged.result, target, self._group, _untold)
        self._folder = step_folder(root, step)
        return Stall(waited - begun, time.perf_counter() - waited)

    def wait(self) -> Place | None:
        """Wait for the save in flight; returns its folder, or None when there was none.

        Raises:
            CheckpointError: when it failed.
        """
        running, self._running = self._running, None
        if running is None:
            return None
        running.result()
        return self._folder

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed on this rank; on others it may go on for a moment."""
        return self._running is not None and self._running.done() and self._running.exception() is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def _outcome(work: Callable[[], T]) -> Future[T]:
    """Do it now, and keep the result or the error: a rank that cannot copy must still tell the others so."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - raised again, on every rank
        future.set_exception(error)
    return future


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def _progress(title: str, group: dist.ProcessGroup | None, size: int | None = None) -> Iterator[Callable[[int], None]]:
    """Progress in bytes of the group's first rank; the others, which have about as much to do, are silent."""
    if _distributed() and dist.get_rank(group):
        yield _untold
        return
    with ProgressBar(title, total=size, unit="bytes") as bar:
        yield bar.advance


def _untold(_: int) -> None:
    """Progress that nobody asked for."""


@contextlib.contextmanager
def _told_alike(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn DCP's exception, which is no Exception and prints one trace a rank, into one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if not isinstance(cause, Exception):  # an interrupt is not the checkpoint's fault
            raise cause from error
        everywhere = len(error.failures) == (dist.get_world_size(group) if _distributed() else 1)
        text, hint = _in_words(cause)
        raise CheckpointError(text if everywhere else f"rank {rank}: {text}", hint=hint) from error
    except RuntimeError as error:
        # What a rank does itself is told above; only the collectives in between are left.
        raise CheckpointError(
            f"the ranks lost each other: {str(error).splitlines()[0]}",
            hint="the rank that ended first says why, in the output of its own",
        ) from error


def _in_words(cause: Exception) -> tuple[str, str | None]:
    if isinstance(cause, MegaError):
        return cause.message, cause.hint
    if isinstance(cause, OSError) and cause.filename:
        return describe_disk_error(cause)
    return f"{type(cause).__name__}: {cause}", None


def _described(manifest: Manifest, written: list[Written], files: dict[str, FileEntry]) -> Manifest:
    """The manifest with all that was written in it."""
    chunks: dict[str, list[Written]] = {}
    for one in written:
        chunks.setdefault(one.slab.key, []).append(one)
        files[one.chunk.file] = one.file
    tensors = {
        key: TensorEntry(
            dtype=DTYPE_NAMES[held[0].slab.dtype],
            shape=held[0].slab.global_shape,
            chunks=tuple(one.chunk for one in sorted(held, key=lambda one: one.slab.offset)),
        )
        for key, held in chunks.items()
    }
    return manifest.model_copy(update={"files": dict(sorted(files.items())), "tensors": tensors})


def _copy_assets(source: Path, folder: Place) -> dict[str, FileEntry]:
    """Copy a folder's files to `assets/`, durably; {name in the checkpoint: entry}."""
    files = {}
    for above, _, names in os.walk(source):
        inside = Path("assets") / Path(above).relative_to(source)
        with folder_at(folder / inside).made():
            for name in sorted(names):
                with open(Path(above) / name, "rb") as stream, NewFile(folder / inside / name) as file:
                    while block := stream.read(1 << 22):
                        file.write(block)
                    files[(inside / name).as_posix()] = file.close()
    return files
