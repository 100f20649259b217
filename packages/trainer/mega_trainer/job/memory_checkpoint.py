"""Copies of the state in host memory, from which ranks resume when their launcher restarts them (GEMINI, SOSP 2023).

    /dev/shm/mega-<user>-<secret>/<rank>.<0 or 1>         the boxes of a rank, one after another, then their description
    /dev/shm/mega-<user>-<secret>/<rank>.<0 or 1>.json    written last: signature; run, step, and the numbers beside it

A launcher outlives its ranks, and with it these files; only the run's user can read them (`private_folder`). Each rank keeps its own last two copies, for some may have made one
more than others when one of them dies; where there are several launchers, so several machines, a copy goes to a rank of the
next one, too. All ranks go on from the newest step of which every rank's copy is somewhere, if that is newer than the newest
checkpoint: as many ranks as before each from its own copy, others from a checkpoint that is made of the copies.
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

from mega_ckpt.host_staging import place_in_buffer, staging_bytes
from mega_ckpt.manifest import DTYPE_NAMES, DTYPES
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_common.atomic_files import open_atomic_file
from mega_common.errors import ConfigError
from mega_common.progress_logging import format_number, logger
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.comm import CommGroup, raise_on_all_ranks
from mega_trainer.job.private_folder import (
    check_private_folder,
    claim_private_folder,
    launcher_folder_path,
    load_secret_key,
    remove_abandoned_folders,
    sign_file_text,
)

T = TypeVar("T")
SnapshotKey = tuple[int, int, int]  # a copy: of which step, of how many ranks, and of which one

ROOT = Path("/dev/shm")


@dataclass(frozen=True)
class CompleteStep:
    """Step of which a copy of every rank exists.

    Attributes:
        step: of it.
        ranks: how many there were.
        state: the numbers beside the tensors, as in a checkpoint.
    """

    step: int
    ranks: int
    state: Mapping[str, Any]


@dataclass(frozen=True)
class MemoryCopy:
    """Copy of this rank's state after a step.

    Attributes:
        step: of it.
        state: the numbers beside the tensors, as in a checkpoint.
        data: uint8.
    """

    step: int
    state: Mapping[str, Any]
    data: Tensor

    def copy_into(self, tensors: Mapping[str, ShardedTensor]) -> None:
        """Copy all boxes from the copy into `tensors`."""
        assert staging_bytes(tensors) <= len(self.data)
        for _, box, place in place_in_buffer(tensors, self.data):
            box.tensor.copy_(place)


class MemoryCopyFolder:
    """Copies in one launcher's folder: two of each rank, of which one may be incomplete.

    Args:
        path: the folder, private to this user.
        run: identity of the run that made the copies.
        key: secret of the run, which signs the copies.
    """

    def __init__(self, path: Path, run: str, key: bytes) -> None:
        self.path, self._run, self._key = path, run, key

    def list_copies(self) -> dict[SnapshotKey, int]:
        """Return the copies in the folder, each with its slot (0 or 1)."""
        found = {}
        for path in sorted(self.path.glob("[0-9]*.[01].json")):
            rank, slot = map(int, path.stem.split("."))
            with contextlib.suppress(FileNotFoundError):  # another rank of this machine begins a new one
                told = self._read_signed(path)
                if told is not None and told["run"] == self._run:
                    found[told["step"], told["ranks"], rank] = slot
        return found

    def read_manifest(self, rank: int, slot: int) -> dict[str, Any]:
        """Return the manifest of a copy."""
        told = self._read_signed(self.path / f"{rank}.{slot}.json")
        assert told is not None  # `copies` has found it
        return told

    def _read_signed(self, path: Path) -> dict[str, Any] | None:
        """Read a manifest; None, with a warning, when this run has not signed it."""
        signature, _, text = path.read_bytes().partition(b"\n")
        if not hmac.compare_digest(signature, sign_file_text(self._key, path.name, text).encode()):
            logger.warning("%s is not signed by this run; the copy is ignored", path)
            return None
        told: dict[str, Any] = json.loads(text)
        return told

    def read_boxes(self, rank: int, slot: int) -> dict[str, ShardedTensor]:
        """Return the boxes of a copy, as views of its memory."""
        data, empty = self.map_copy_file(rank, slot), dict[str, ShardedTensor]()
        for key, shape, offset, size, dtype in json.loads(
            bytes(data[self.read_manifest(rank, slot)["room"] :].numpy())
        ):
            box = TensorBox(tuple(offset), torch.empty(size, dtype=DTYPES[dtype], device="meta"))
            empty.setdefault(key, ShardedTensor(tuple(shape), [])).boxes.append(box)
        held = {key: ShardedTensor(sharded.shape, []) for key, sharded in empty.items()}
        for key, box, place in place_in_buffer(empty, data):
            held[key].boxes.append(TensorBox(box.offset, place))
        return held

    def map_copy_file(self, rank: int, slot: int, size: int | None = None) -> Tensor:
        """Map a copy's file to memory, uint8 [size]: a new file, or without a size an existing one.

        Raises:
            ConfigError: when there is no room.
        """
        path = self.path / f"{rank}.{slot}"
        if size is None:
            size = path.stat().st_size
        else:
            check_private_folder(self.path)
            (self.path / f"{rank}.{slot}.json").unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "ab") as stream:
                try:
                    stream.truncate(size)
                    os.posix_fallocate(stream.fileno(), 0, max(1, size))
                except OSError as error:
                    path.unlink()
                    rule = f"no room in {self.path.parent} for a copy of {format_number(size)}B: {error.strerror}"
                    raise ConfigError(f"checkpoint.memory_every: {rule}", hint="make that larger, or set 0") from error
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def write_manifest(self, rank: int, slot: int, manifest: Mapping[str, Any]) -> None:
        """Mark a copy as complete by writing its manifest."""
        path, text = self.path / f"{rank}.{slot}.json", json.dumps({**manifest, "run": self._run}).encode()
        with open_atomic_file(path) as stream:
            stream.write(sign_file_text(self._key, path.name, text).encode() + b"\n" + text)

    def remove_copies(self) -> None:
        """Remove all copies; the folder and its lock stay."""
        for path in self.path.glob("[0-9]*"):
            path.unlink(missing_ok=True)


class MemoryCheckpoint:
    """Memory copies of one run, as one rank accesses them; every rank makes one.

    Args:
        output: the run's folder.
        world: all ranks.
        environment: of a rank that torchrun has started.
        launcher: the process that outlives this rank.
        root: of the folders.
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
            remove_abandoned_folders(root)
        with raise_on_all_ranks(world):
            self._lock = claim_private_folder(self._folder.path, launcher)  # held until this process ends
        here = (socket.gethostname(), str(self._folder.path))
        everyone = self._gather_objects((here, list(self._folder.list_copies())))
        nodes, self._copies = [node for node, _ in everyone], [set(copies) for _, copies in everyone]
        self._taker = [_backup_rank(nodes, rank) for rank in range(world.size)]
        self._newest: dict[int, int] = {}  # which of a rank's two copies is not to be written over

    @property
    def rank_count(self) -> int:
        """Present number of ranks."""
        return self._world.size

    def newest_complete_step(self) -> CompleteStep | None:
        """Return the newest step from which all ranks can resume; None when no step has every rank's copy."""
        there = {copy for copies in self._copies for copy in copies}
        whole = {
            (step, ranks) for step, ranks, _ in there if all((step, ranks, rank) in there for rank in range(ranks))
        }
        if not whole:
            return None
        step, ranks = max(whole)
        own = next((copy for copy in self._copies[self._world.rank] if copy[:2] == (step, ranks)), None)
        state = None if own is None else self._folder.read_manifest(own[2], self._folder.list_copies()[own])["state"]
        return CompleteStep(step, ranks, next(state for state in self._gather_objects(state) if state is not None))

    def fetch_local_copy(self, complete_step: CompleteStep) -> MemoryCopy:
        """Return this rank's copy, when the number of ranks has not changed."""
        for rank in range(complete_step.ranks):
            if (complete_step.step, complete_step.ranks, rank) not in self._copies[rank]:
                self._send_copy(complete_step, rank)
        held = self._folder.list_copies()
        self._newest = {
            rank: slot for (*of, rank), slot in held.items() if of == [complete_step.step, complete_step.ranks]
        }
        slot = held[complete_step.step, complete_step.ranks, self._world.rank]
        return MemoryCopy(complete_step.step, complete_step.state, self._folder.map_copy_file(self._world.rank, slot))

    def checkpoint_shares(self, complete_step: CompleteStep) -> dict[str, ShardedTensor]:
        """Return this rank's part of a checkpoint made of the copies, for any present number of ranks."""
        held, tensors = self._folder.list_copies(), dict[str, ShardedTensor]()
        for rank in range(complete_step.ranks):
            copy = (complete_step.step, complete_step.ranks, rank)
            holders = [index for index, copies in enumerate(self._copies) if copy in copies]
            if holders[rank % len(holders)] == self._world.rank:
                for key, sharded in self._folder.read_boxes(rank, held[copy]).items():
                    known = tensors.setdefault(key, ShardedTensor(sharded.shape, [])).boxes
                    known += [box for box in sharded.boxes if all(box.offset != other.offset for other in known)]
        return tensors

    def _gather_objects(self, value: T) -> list[T]:
        """Gather a value of every rank."""
        values = [value] * self._world.size
        if self._world.size > 1:
            dist.all_gather_object(values, value, group=self._world.process_group)
        return values

    def _send_copy(self, complete_step: CompleteStep, rank: int) -> None:
        """Send a rank the copy that it lacks, from the first rank that has it."""
        copy = (complete_step.step, complete_step.ranks, rank)
        holder = next(index for index, copies in enumerate(self._copies) if copy in copies)
        group = self._world.process_group
        if self._world.rank == holder:
            slot = self._folder.list_copies()[copy]
            data = self._folder.map_copy_file(rank, slot)
            dist.send_object_list([len(data), self._folder.read_manifest(rank, slot)], rank, group=group)
            dist.send(data, rank, group=group)
        elif self._world.rank == rank:
            told: list[Any] = [None, None]
            dist.recv_object_list(told, holder, group=group)
            dist.recv(self._folder.map_copy_file(rank, 0, told[0]), holder, group=group)
            self._folder.write_manifest(rank, 0, told[1])

    def save_copies(self, step: int, tensors: Mapping[str, ShardedTensor], state: Mapping[str, Any]) -> None:
        """Copy this rank's state, and receive the copies of other ranks that this rank keeps.

        Raises:
            ConfigError: on every rank, when there is no room on some.
        """
        own, group, taker = self._world.rank, self._world.process_group, self._taker[self._world.rank]
        rooms, boxes = self._gather_objects(staging_bytes(tensors)), describe_boxes(tensors)
        sizes = [begin + count for begin, count in zip(rooms, self._gather_objects(len(boxes)), strict=True)]
        kept = [own, *(rank for rank, other in enumerate(self._taker) if other == own)]
        slots = {rank: 1 - self._newest.get(rank, 1) for rank in kept}
        with raise_on_all_ranks(self._world):
            buffers = {rank: self._folder.map_copy_file(rank, slots[rank], sizes[rank]) for rank in kept}
        for _, box, place in place_in_buffer(tensors, buffers[own]):
            place.copy_(box.tensor.detach())
        buffers[own][rooms[own] :] = boxes
        works = [dist.irecv(buffers[rank], rank, group=group) for rank in kept[1:]]
        works += [] if taker is None else [dist.isend(buffers[own], taker, group=group)]
        for work in works:
            assert work is not None
            work.wait()
        for rank in kept:
            told = {"step": step, "ranks": self._world.size, "room": rooms[rank], "state": state}
            self._folder.write_manifest(rank, slots[rank], told)
        self._newest = slots

    def remove_run_copies(self) -> None:
        """Remove the copies, before a rollback or after a checkpoint is saved."""
        if self._leads:
            self._folder.remove_copies()
        self._newest = {}

    def remove_folder(self) -> None:
        """Remove the folder at the end of the run."""
        os.close(self._lock)
        if self._leads:
            shutil.rmtree(self._folder.path, ignore_errors=True)


def describe_boxes(tensors: Mapping[str, ShardedTensor]) -> Tensor:
    """Return the description of all boxes, in the order of `place_in_buffer`: key, global shape, offset, shape and
    dtype, as JSON in uint8.
    """
    boxes = [
        [key, list(held.shape), list(box.offset), list(box.tensor.shape), DTYPE_NAMES[box.tensor.dtype]]
        for key, held in tensors.items()
        for box in held.boxes
    ]
    return torch.frombuffer(bytearray(json.dumps(boxes).encode()), dtype=torch.uint8)


def should_keep_copies(config: RunConfig, environment: Mapping[str, str]) -> bool:
    """Return whether a run keeps copies: if configured, and if the launcher of its ranks restarts them."""
    if not config.checkpoint.memory_every:
        return False
    if environment.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        logger.info(
            "checkpoint.memory_every: no copies are kept, as no launcher starts ranks again (torchrun --max-restarts)"
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
    there = [other for other, node in enumerate(nodes) if node == following]
    return there[here.index(rank) % len(there)]
