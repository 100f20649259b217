"""Checkpoint store: save and load sharded tensors of all ranks.

A save writes to a hidden folder and commits in one operation after the files of all ranks are durable: a rename on a file
system, the put of the manifest on an object store. A kill at any time leaves the previous checkpoints unchanged, and the
new one complete or absent.
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
from mega_ckpt.checkpoint_folders import (
    delete_old_checkpoints,
    get_checkpoint_committer,
    get_checkpoint_step_folder,
    latest_checkpoint,
    list_checkpoints,
    remove_leftovers,
)
from mega_ckpt.dcp_planners import (
    ShardStorageReader,
    ShardStorageWriter,
    TensorSliceLoadPlanner,
    TensorSliceSavePlanner,
    WrittenChunk,
)
from mega_ckpt.host_staging import HostStaging
from mega_ckpt.manifest import DTYPE_NAMES, Manifest, ManifestFileEntry, ManifestTensorEntry, make_checkpoint_manifest
from mega_ckpt.shard_files import HashingFileWriter
from mega_ckpt.storage import open_storage_folder
from mega_ckpt.tensor_pieces import ShardedTensor
from mega_common.atomic_files import describe_disk_error
from mega_common.errors import CheckpointError, MegaError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location, RemotePath, parse_location
from mega_common.progress_logging import ProgressBar, logger

__all__ = [
    "AsyncSaver",
    "Checkpoint",
    "Location",
    "RemotePath",
    "delete_old_checkpoints",
    "get_checkpoint_step_folder",
    "latest_checkpoint",
    "list_checkpoints",
    "load_sharded_checkpoint",
    "parse_location",
    "remove_leftovers",
    "save_sharded_checkpoint",
]  # fmt: skip

T = TypeVar("T")


def save_sharded_checkpoint(
    root: Location,
    step: int,
    tensors: Mapping[str, ShardedTensor],
    *,
    model: ModelConfig,
    state: Mapping[str, Any],
    assets: Path | None = None,
    group: dist.ProcessGroup | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Location:
    """Save a mega checkpoint of all ranks' tensor slices to `<root>/step-<step>` and return its folder.
    When the call returns, the checkpoint is durable and complete, on every rank.

    The boxes of all ranks must tile each tensor; a box that several ranks have is written once. A checkpoint of the same
    step is replaced. `state`, `assets` (a folder, copied whole) and `provenance` are those of the group's first rank.

    Raises:
        CheckpointError: on all ranks, when any rank fails. No files are left then.
    """
    with _progress_on_first_rank(f"saving step {step}", group) as advance:
        _save_with_dcp(lambda: tensors, _CheckpointTarget(root, step, model, state, assets, provenance), group, advance)
    return get_checkpoint_step_folder(root, step)


@dataclass
class _CheckpointTarget:
    """Folder that a save writes to; created, completed and committed by the group's first rank."""

    root: Location
    step: int
    model: ModelConfig
    state: Mapping[str, Any]
    assets: Path | None
    provenance: Mapping[str, Any] | None
    folder: Location | None = None
    begun: float = field(default_factory=time.perf_counter)

    def begin_save(self) -> Location:
        """Create the folder of a new checkpoint, after checking that the checkpoint can be described."""
        make_checkpoint_manifest(self.step, self.model, self.state, self.provenance)
        if self.assets and not self.assets.is_dir():
            raise CheckpointError(f"{self.assets}: no such folder; it must have the asset files of the checkpoint")
        self.folder = get_checkpoint_committer(self.root).begin_save(self.step)
        return self.folder

    def finish_save(self, written: list[WrittenChunk]) -> None:
        """Add the asset files and the manifest to the checkpoint folder, and commit it.
        The shards of all ranks must be durable.
        """
        assert self.folder is not None
        files = _copy_assets(self.assets, self.folder) if self.assets else {}
        manifest = make_checkpoint_manifest(self.step, self.model, self.state, self.provenance)
        folder, self.folder = self.folder, None
        get_checkpoint_committer(self.root).commit_save(folder, _fill_manifest(manifest, written, files))
        logger.info(
            "saved step %d in %.1f s: %s",
            self.step,
            time.perf_counter() - self.begun,
            get_checkpoint_step_folder(self.root, self.step),
        )

    def discard_save(self) -> None:
        """Remove the folder of the unfinished checkpoint, unless commit has started."""
        if self.folder is not None:
            get_checkpoint_committer(self.root).discard_save(self.folder)


def _save_with_dcp(
    tensors: Callable[[], Mapping[str, ShardedTensor]],
    target: _CheckpointTarget,
    group: dist.ProcessGroup | None,
    advance: Callable[[int], None],
) -> None:
    try:
        with _same_error_on_all_ranks(group):
            writer, planner = ShardStorageWriter(target, advance), TensorSliceSavePlanner(tensors)
            dcp_save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=not _distributed())
    except CheckpointError as error:
        # Only DCP's own error guarantees that no rank is still writing.
        if isinstance(error.__cause__, CheckpointException):
            target.discard_save()
        raise


def load_sharded_checkpoint(
    folder: Location,
    tensors: Mapping[str, ShardedTensor],
    *,
    group: dist.ProcessGroup | None = None,
    verify: bool = True,
) -> None:
    """Fill this rank's slices of `tensors` from a mega checkpoint, in place.
    Each rank passes its own slices; tensors left out are not read.

    With `verify`, every chunk that is read is compared with its checksum. Dtypes are not cast.

    Raises:
        CheckpointError: on all ranks, when a tensor is missing, has another shape or dtype, or is damaged. The content
            of the boxes is undefined then.
    """
    size = sum(box.tensor.nbytes for sharded in tensors.values() for box in sharded.boxes)
    with _same_error_on_all_ranks(group), _progress_on_first_rank(f"loading {folder.name}", group, size) as advance:
        reader, planner = (
            ShardStorageReader(folder, list(tensors), advance, verify=verify),
            TensorSliceLoadPlanner(folder, tensors),
        )
        dcp_load({}, storage_reader=reader, planner=planner, process_group=group, no_dist=not _distributed())


class SaveStallTime(NamedTuple):
    """Seconds for which an asynchronous save blocked its caller: waiting for the previous save, and copying."""

    waiting: float
    copying: float


class AsyncSaver:
    """Asynchronous checkpoint saver.
    It copies this rank's tensor slices to host memory, then a thread writes them. One save runs at a time.

    The thread's collectives use a separate process group (gloo), which the constructor creates with torch.distributed, so
    every rank must construct a saver. An error of the thread is raised on every rank by the next `start_save` or by
    `wait_for_save`.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if _distributed() else None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._folder: Location | None = None
        self._staging = HostStaging()

    def start_save(
        self,
        root: Location,
        step: int,
        tensors: Mapping[str, ShardedTensor],
        *,
        model: ModelConfig,
        state: Mapping[str, Any],
        assets: Path | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> SaveStallTime:
        """Save all ranks' tensor slices to `<root>/step-<step>` in the background, after the previous save; return stall times.
        The call itself waits for the previous save. Afterwards `tensors` and `state` may change.

        Raises:
            CheckpointError: when the previous save failed. The new one is not started then.
        """
        started = time.perf_counter()
        self.wait_for_save()
        waited = time.perf_counter()
        staged = _run_into_future(lambda: self._staging.copy_slices_to_host(tensors))
        target = _CheckpointTarget(root, step, model, copy.deepcopy(dict(state)), assets, copy.deepcopy(provenance))
        self._running = self._thread.submit(_save_with_dcp, staged.result, target, self._group, _no_progress)
        self._folder = get_checkpoint_step_folder(root, step)
        return SaveStallTime(waited - started, time.perf_counter() - waited)

    def wait_for_save(self) -> Location | None:
        """Wait for the checkpoint save in flight; return its checkpoint folder, or None if there was none.

        Raises:
            CheckpointError: when it failed.
        """
        running, self._running = self._running, None
        if running is None:
            return None
        running.result()
        return self._folder

    @property
    def has_failed(self) -> bool:
        """True if the save in flight has failed on this rank; on other ranks it may continue for a moment."""
        return self._running is not None and self._running.done() and self._running.exception() is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait_for_save()
        finally:
            self._thread.shutdown()


def _run_into_future(work: Callable[[], T]) -> Future[T]:
    """Run `work` now and store its result or error: a rank that fails must still join the collectives."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 - raised again, on every rank
        future.set_exception(error)
    return future


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def _progress_on_first_rank(
    title: str, group: dist.ProcessGroup | None, size: int | None = None
) -> Iterator[Callable[[int], None]]:
    """Yield a progress callback in bytes; only the group's first rank shows progress."""
    if _distributed() and dist.get_rank(group):
        yield _no_progress
        return
    with ProgressBar(title, total=size, unit="bytes") as bar:
        yield bar.advance


def _no_progress(_: int) -> None:
    """Ignore progress."""


@contextlib.contextmanager
def _same_error_on_all_ranks(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Convert DCP's CheckpointException (a BaseException with one trace per rank) to a CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if not isinstance(cause, Exception):  # an interrupt is not an error of the checkpoint
            raise cause from error
        on_all_ranks = len(error.failures) == (dist.get_world_size(group) if _distributed() else 1)
        text, hint = _explain_error(cause)
        raise CheckpointError(text if on_all_ranks else f"rank {rank}: {text}", hint=hint) from error
    except RuntimeError as error:
        # Errors of a rank's own work are handled above; this one comes from a collective.
        raise CheckpointError(
            f"the connection between ranks was lost: {str(error).splitlines()[0]}",
            hint="see the output of the rank that ended first",
        ) from error


def _explain_error(cause: Exception) -> tuple[str, str | None]:
    if isinstance(cause, MegaError):
        return cause.message, cause.hint
    if isinstance(cause, OSError) and cause.filename:
        return describe_disk_error(cause, full="free space there, or keep fewer (checkpoint.keep)")
    return f"{type(cause).__name__}: {cause}", None


def _fill_manifest(manifest: Manifest, written: list[WrittenChunk], files: dict[str, ManifestFileEntry]) -> Manifest:
    """Return the manifest with all written chunks and files."""
    chunks: dict[str, list[WrittenChunk]] = {}
    for one in written:
        chunks.setdefault(one.slab.key, []).append(one)
        files[one.chunk.file] = one.file
    tensors = {
        key: ManifestTensorEntry(
            dtype=DTYPE_NAMES[written_chunks[0].slab.dtype],
            shape=written_chunks[0].slab.global_shape,
            chunks=tuple(one.chunk for one in sorted(written_chunks, key=lambda one: one.slab.offset)),
        )
        for key, written_chunks in chunks.items()
    }
    return manifest.model_copy(update={"files": dict(sorted(files.items())), "tensors": tensors})


def _copy_assets(source: Path, folder: Location) -> dict[str, ManifestFileEntry]:
    """Copy a folder's files to `assets/`, durably; return {name in the checkpoint: entry}."""
    files = {}
    for parent, _, names in os.walk(source):
        inside = Path("assets") / Path(parent).relative_to(source)
        with open_storage_folder(folder / inside).create_folder():
            for name in sorted(names):
                with open(Path(parent) / name, "rb") as stream, HashingFileWriter(folder / inside / name) as file:
                    while block := stream.read(1 << 22):
                        file.write_hashed(block)
                    files[(inside / name).as_posix()] = file.close()
    return files
