"""Copies of the state in host memory, from which ranks resume when their launcher restarts them (GEMINI, SOSP 2023).

    /dev/shm/mega-<user>-<secret>/<rank>.<0 or 1>         the boxes of a rank, one after another, then their description
    /dev/shm/mega-<user>-<secret>/<rank>.<0 or 1>.json    written last: signature; run, step, and the JSON state

The files live as long as the launcher, which outlives its ranks; only the run's user can read them (`private_folder`). Each
rank keeps its last two copies, because some ranks may have made one more than others when a rank dies. With several machines
a copy is also sent to a rank of the next machine. All ranks resume from the newest step with copies of every rank, if it is
newer than the newest checkpoint: with an unchanged number of ranks each from its own copy, else from a checkpoint that is
written from the copies.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mega_ckpt.host_staging import (
    compute_staging_buffer_size,
    copy_sharded_tensors_to_buffer,
    is_on_cuda,
    iterate_buffer_views,
    pin_host_memory,
)
from mega_ckpt.manifest import DTYPE_NAMES, DTYPES
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_common.atomic_files import open_atomic_file
from mega_common.errors import ConfigError
from mega_common.progress_logging import format_with_decimal_unit, logger
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.comm import CommGroup, raise_on_all_ranks
from mega_trainer.job.private_folder import (
    check_private_folder,
    claim_private_folder,
    launcher_folder_path,
    load_secret_key,
    remove_abandoned_memory_copies,
    sign_file_text,
)

T = TypeVar("T")
SnapshotKey = tuple[int, int, int]  # of a copy: step, number of ranks, rank

ROOT = Path("/dev/shm")


@dataclass(frozen=True)
class MemoryCopyStep:
    """Step for which memory copies of every rank's state exist, so that a run can resume from it.

    Attributes:
        step: of the copies.
        ranks: number of ranks that made them.
        state: JSON state, as in a checkpoint.
    """

    step: int
    ranks: int
    state: Mapping[str, Any]


@dataclass(frozen=True)
class TrainingStateCopy:
    """Copy of this rank's training state after a step, in host memory.

    Attributes:
        step: of the copy.
        state: JSON state, as in a checkpoint.
        data: uint8, the boxes.
    """

    step: int
    state: Mapping[str, Any]
    data: Tensor

    def copy_into(self, tensors: Mapping[str, ShardedTensor]) -> None:
        """Copy the tensor data of this memory copy into this rank's slices of `tensors`, in place."""
        assert compute_staging_buffer_size(tensors) <= len(self.data)
        for _, box, copied in iterate_buffer_views(tensors, self.data):
            box.tensor.copy_(copied)


class MemoryCopyFolder:
    """Private folder of one launcher with copies of training states in memory.
    It has two copies of each rank, of which one may be incomplete.

    Args:
        path: the folder, private to this user.
        run: identity of the run that made the copies.
        key: secret of the run, which signs the copies.
    """

    def __init__(self, path: Path, run: str, key: bytes) -> None:
        self.path, self._run, self._key = path, run, key

    def list_copies(self) -> dict[SnapshotKey, int]:
        """Return the complete memory copies of training states in the folder, {(step, number of ranks, rank): slot}.
        Each rank has two slots, 0 and 1.
        """
        found = {}
        for path in sorted(self.path.glob("[0-9]*.[01].json")):
            rank, slot = map(int, path.stem.split("."))
            with contextlib.suppress(FileNotFoundError):  # another rank of this machine begins a new copy
                manifest = self._read_signed(path)
                if manifest is not None and manifest["run"] == self._run:
                    found[manifest["step"], manifest["ranks"], rank] = slot
        return found

    def read_manifest(self, rank: int, slot: int) -> dict[str, Any]:
        """Return the JSON manifest of the memory copy of `rank` in `slot`, which describes its step and state."""
        manifest = self._read_signed(self.path / f"{rank}.{slot}.json")
        assert manifest is not None  # `list_copies` has found it
        return manifest

    def _read_signed(self, path: Path) -> dict[str, Any] | None:
        """Read a manifest; None, with a warning, when this run has not signed it."""
        signature, _, text = path.read_bytes().partition(b"\n")
        if not hmac.compare_digest(signature, sign_file_text(self._key, path.name, text).encode()):
            logger.warning("%s is not signed by this run; the copy is ignored", path)
            return None
        manifest: dict[str, Any] = json.loads(text)
        return manifest

    def read_tensor_slices(self, rank: int, slot: int) -> dict[str, ShardedTensor]:
        """Return the tensor slices in the memory copy of `rank` in `slot`, as views of its mapped file."""
        data, empty = self.memory_map_copy_file(rank, slot), dict[str, ShardedTensor]()
        for key, shape, offset, size, dtype in json.loads(
            bytes(data[self.read_manifest(rank, slot)["room"] :].numpy())
        ):
            box = TensorBox(tuple(offset), torch.empty(size, dtype=DTYPES[dtype], device="meta"))
            empty.setdefault(key, ShardedTensor(tuple(shape), [])).boxes.append(box)
        copied = {key: ShardedTensor(sharded.shape, []) for key, sharded in empty.items()}
        for key, box, values in iterate_buffer_views(empty, data):
            copied[key].boxes.append(TensorBox(box.offset, values))
        return copied

    def memory_map_copy_file(self, rank: int, slot: int, size: int | None = None) -> Tensor:
        """Return a rank's memory copy as a uint8 tensor mapped to its file: a new one of `size` bytes, else the existing one.

        Raises:
            ConfigError: when there is not enough free memory.
        """
        path = self.path / f"{rank}.{slot}"
        if size is None:
            size = path.stat().st_size
        else:
            check_private_folder(self.path)
            self.remove_manifest(rank, slot)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "ab") as stream:
                try:
                    stream.truncate(size)
                    os.posix_fallocate(stream.fileno(), 0, max(1, size))
                except OSError as error:
                    path.unlink()
                    rule = (
                        f"requires {format_with_decimal_unit(size)}B in {self.path.parent} for a copy: {error.strerror}"
                    )
                    hint = "enlarge it, or set checkpoint.memory_every=0"
                    raise ConfigError(f"checkpoint.memory_every {rule}", hint=hint) from error
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def write_manifest(self, rank: int, slot: int, manifest: Mapping[str, Any]) -> None:
        """Write the manifest of the memory copy of `rank` in `slot`, which marks the copy as complete."""
        path, text = self.path / f"{rank}.{slot}.json", json.dumps({**manifest, "run": self._run}).encode()
        with open_atomic_file(path) as stream:
            stream.write(sign_file_text(self._key, path.name, text).encode() + b"\n" + text)

    def remove_manifest(self, rank: int, slot: int) -> None:
        """Remove the manifest of the memory copy of `rank` in `slot`, before its file changes."""
        (self.path / f"{rank}.{slot}.json").unlink(missing_ok=True)

    def remove_copies(self) -> None:
        """Remove all memory copies in the folder; the folder and its lock file stay."""
        for path in self.path.glob("[0-9]*"):
            path.unlink(missing_ok=True)


class MemoryCheckpoint:
    """Copies of a run's state in host memory, from which a restart resumes, as one rank accesses them.
    They are in the host memory of its own machine and, with several machines, of another. Every rank creates one.

    Args:
        output: the run's folder.
        world: all ranks.
        environment: of a rank that torchrun has started.
        launcher: process id of the launcher.
        root: parent of the folders.
    """

    def __init__(
        self, output: str, world: CommGroup, environment: Mapping[str, str], launcher: int, root: Path = ROOT
    ) -> None:
        self._world, self._leads = world, environment.get("LOCAL_RANK", "0") == "0"
        run = f"{Path(output).resolve()} {environment.get('TORCHELASTIC_RUN_ID')}"
        with raise_on_all_ranks(world):
            key = load_secret_key(Path(output)) if world.rank == 0 else b""
        key = self._gather_objects(key)[0]
        self._folder = MemoryCopyFolder(launcher_folder_path(root, key, launcher), run, key)
        if self._leads:
            remove_abandoned_memory_copies(root)
        with raise_on_all_ranks(world):
            self._lock = claim_private_folder(self._folder.path, launcher)  # until this process ends
        here = (socket.gethostname(), str(self._folder.path))
        by_rank = self._gather_objects((here, list(self._folder.list_copies())))
        nodes, self._copies = [node for node, _ in by_rank], [set(copies) for _, copies in by_rank]
        self._backup_ranks = [_backup_rank(nodes, rank) for rank in range(world.size)]
        self._newest: dict[int, int] = {}  # slot of each rank's newest copy, which must not be overwritten
        self._buffers: dict[tuple[int, int], Tensor] = {}  # mapped file by rank and slot
        self._pinned = set[tuple[int, int]]()  # those of them that CUDA has pinned

    @property
    def rank_count(self) -> int:
        """Present number of ranks of the run."""
        return self._world.size

    def newest_complete_step(self) -> MemoryCopyStep | None:
        """Return the newest step that has every rank's memory copy, from which all ranks can resume, or None."""
        existing = {copy for copies in self._copies for copy in copies}
        complete = {
            (step, ranks)
            for step, ranks, _ in existing
            if all((step, ranks, rank) in existing for rank in range(ranks))
        }
        if not complete:
            return None
        step, ranks = max(complete)
        own = next((copy for copy in self._copies[self._world.rank] if copy[:2] == (step, ranks)), None)
        state = None if own is None else self._folder.read_manifest(own[2], self._folder.list_copies()[own])["state"]
        return MemoryCopyStep(step, ranks, next(state for state in self._gather_objects(state) if state is not None))

    def fetch_local_copy(self, complete_step: MemoryCopyStep) -> TrainingStateCopy:
        """Return this rank's memory copy of `complete_step`, received from a backup rank if it is lost here.

        The number of ranks of the run may not have changed since.
        """
        for rank in range(complete_step.ranks):
            if (complete_step.step, complete_step.ranks, rank) not in self._copies[rank]:
                self._send_copy(complete_step, rank)
        copies = self._folder.list_copies()
        self._newest = {
            rank: slot for (*key, rank), slot in copies.items() if key == [complete_step.step, complete_step.ranks]
        }
        slot = copies[complete_step.step, complete_step.ranks, self._world.rank]
        return TrainingStateCopy(
            complete_step.step, complete_step.state, self._folder.memory_map_copy_file(self._world.rank, slot)
        )

    def get_checkpoint_shares_of_copies(self, complete_step: MemoryCopyStep) -> dict[str, ShardedTensor]:
        """Return the tensors that this rank contributes to a checkpoint made of memory copies.
        The copies have the state after `complete_step`; the present number of ranks may be any.
        """
        slots, tensors = self._folder.list_copies(), dict[str, ShardedTensor]()
        for rank in range(complete_step.ranks):
            copy = (complete_step.step, complete_step.ranks, rank)
            holders = [index for index, copies in enumerate(self._copies) if copy in copies]
            if holders[rank % len(holders)] == self._world.rank:
                for key, sharded in self._folder.read_tensor_slices(rank, slots[copy]).items():
                    boxes = tensors.setdefault(key, ShardedTensor(sharded.shape, [])).boxes
                    boxes += [box for box in sharded.boxes if all(box.offset != other.offset for other in boxes)]
        return tensors

    def _gather_objects(self, value: T) -> list[T]:
        """Gather a value of every rank."""
        values = [value] * self._world.size
        if self._world.size > 1:
            dist.all_gather_object(values, value, group=self._world.process_group)
        return values

    def _send_copy(self, complete_step: MemoryCopyStep, rank: int) -> None:
        """Send a rank the copy that it lacks, from the first rank that has it."""
        copy = (complete_step.step, complete_step.ranks, rank)
        holder = next(index for index, copies in enumerate(self._copies) if copy in copies)
        group = self._world.process_group
        if self._world.rank == holder:
            slot = self._folder.list_copies()[copy]
            data = self._folder.memory_map_copy_file(rank, slot)
            dist.send_object_list([len(data), self._folder.read_manifest(rank, slot)], rank, group=group)
            dist.send(data, rank, group=group)
        elif self._world.rank == rank:
            received: list[Any] = [None, None]
            dist.recv_object_list(received, holder, group=group)
            dist.recv(self._folder.memory_map_copy_file(rank, 0, received[0]), holder, group=group)
            self._folder.write_manifest(rank, 0, received[1])

    def save_copies(self, step: int, tensors: Mapping[str, ShardedTensor], state: Mapping[str, Any]) -> None:
        """Write a memory copy of this rank's training state after `step`, and receive copies of other ranks.
        The copy has this rank's `tensors` and `state`; the received copies are those that this rank keeps. A collective
        call.

        Raises:
            ConfigError: on every rank, when some rank has not enough free memory.
        """
        own, group, backup = self._world.rank, self._world.process_group, self._backup_ranks[self._world.rank]
        tensor_bytes, boxes = (
            self._gather_objects(compute_staging_buffer_size(tensors)),
            encode_tensor_slice_metadata(tensors),
        )
        sizes = [begin + count for begin, count in zip(tensor_bytes, self._gather_objects(len(boxes)), strict=True)]
        kept = [own, *(rank for rank, other in enumerate(self._backup_ranks) if other == own)]
        slots = {rank: 1 - self._newest.get(rank, 1) for rank in kept}
        with raise_on_all_ranks(self._world):
            buffers = {rank: self._map_buffer(rank, slots[rank], sizes[rank]) for rank in kept}
        if is_on_cuda(tensors) and (own, slots[own]) not in self._pinned:
            pin_host_memory(buffers[own])
            self._pinned.add((own, slots[own]))
        copy_sharded_tensors_to_buffer(tensors, buffers[own])
        buffers[own][tensor_bytes[own] :] = boxes
        works = [dist.irecv(buffers[rank], rank, group=group) for rank in kept[1:]]
        works += [] if backup is None else [dist.isend(buffers[own], backup, group=group)]
        for work in works:
            assert work is not None
            work.wait()
        for rank in kept:
            manifest = {"step": step, "ranks": self._world.size, "room": tensor_bytes[rank], "state": state}
            self._folder.write_manifest(rank, slots[rank], manifest)
        self._newest = slots

    def _map_buffer(self, rank: int, slot: int, size: int) -> Tensor:
        """Return the mapped file of a new copy; a file of an equal size stays mapped, and pinned, from save to save."""
        mapped = self._buffers.pop((rank, slot), None)
        if mapped is None or len(mapped) != size:
            del mapped  # before the file changes its size
            self._pinned.discard((rank, slot))
            mapped = self._folder.memory_map_copy_file(rank, slot, size)
        self._folder.remove_manifest(rank, slot)
        self._buffers[rank, slot] = mapped
        return mapped

    def remove_run_copies(self) -> None:
        """Remove all memory copies of the run, before a rollback or after a checkpoint is saved."""
        self._buffers.clear()
        self._pinned.clear()
        if self._leads:
            self._folder.remove_copies()
        self._newest = {}

    def remove_folder(self) -> None:
        """Remove the folder of memory copies at the end of the run."""
        self._buffers.clear()
        os.close(self._lock)
        if self._leads:
            shutil.rmtree(self._folder.path, ignore_errors=True)


def encode_tensor_slice_metadata(tensors: Mapping[str, ShardedTensor]) -> Tensor:
    """Return the metadata of all slices of sharded tensors, in a memory copy's order, as JSON in a uint8 tensor.
    It has the key, global shape, offset, shape and dtype of each slice of `tensors`.
    """
    boxes = [
        [key, list(sharded.shape), list(box.offset), list(box.tensor.shape), DTYPE_NAMES[box.tensor.dtype]]
        for key, sharded in tensors.items()
        for box in sharded.boxes
    ]
    return torch.frombuffer(bytearray(json.dumps(boxes).encode()), dtype=torch.uint8)


def should_keep_memory_copies(config: RunConfig, environment: Mapping[str, str]) -> bool:
    """Return whether a run keeps memory copies of its state: if configured, and its launcher restarts ranks."""
    if not config.checkpoint.memory_every:
        return False
    if environment.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        logger.info(
            "checkpoint.memory_every has no effect without a launcher that restarts ranks (torchrun --max-restarts)"
        )
        return False
    return True


def _backup_rank(nodes: Sequence[object], rank: int) -> int | None:
    """Return the rank on the next node that keeps a copy of a rank's state; None if all ranks are on one node."""
    order = list(dict.fromkeys(nodes))
    if len(order) == 1:
        return None
    here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    following = order[(order.index(nodes[rank]) + 1) % len(order)]
    candidates = [other for other, node in enumerate(nodes) if node == following]
    return candidates[here.index(rank) % len(candidates)]
