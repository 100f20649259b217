"""Copies of the state in host memory, from which ranks that their launcher starts again go on (GEMINI, SOSP 2023).

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

from mega_ckpt.manifest import DTYPE_NAMES, DTYPES
from mega_ckpt.pieces import Box, Sharded
from mega_ckpt.staging import laid_out, room
from mega_common.errors import ConfigError
from mega_common.files import atomic_file
from mega_common.log import human, logger
from mega_trainer.comm import Group, raised_alike
from mega_trainer.config import RunConfig
from mega_trainer.job.private_folder import (
    check_private,
    claim_folder,
    folder_path,
    load_key,
    sign,
    sweep_folders,
)

T = TypeVar("T")
Held = tuple[int, int, int]  # a copy: of which step, of how many ranks, and of which one

ROOT = Path("/dev/shm")


@dataclass(frozen=True)
class Whole:
    """A step that there is a copy of from every rank there was.

    Attributes:
        step: of it.
        ranks: how many there were.
        state: the numbers beside the tensors, as in a checkpoint.
    """

    step: int
    ranks: int
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Copy:
    """This rank's of a step.

    Attributes:
        step: of it.
        state: the numbers beside the tensors, as in a checkpoint.
        data: uint8.
    """

    step: int
    state: Mapping[str, Any]
    data: Tensor

    def fill(self, tensors: Mapping[str, Sharded]) -> None:
        """Copy all boxes from it."""
        assert room(tensors) <= len(self.data)
        for _, box, place in laid_out(tensors, self.data):
            box.tensor.copy_(place)


class Folder:
    """The copies in one launcher's folder: of each rank two, of which one may be being written.

    Args:
        path: the folder, private to this user.
        run: identity of the run that made the copies.
        key: secret of the run, which signs the copies.
    """

    def __init__(self, path: Path, run: str, key: bytes) -> None:
        self.path, self._run, self._key = path, run, key

    def copies(self) -> dict[Held, int]:
        """Each that is there, and which of the two it is."""
        found = {}
        for path in sorted(self.path.glob("[0-9]*.[01].json")):
            rank, slot = map(int, path.stem.split("."))
            with contextlib.suppress(FileNotFoundError):  # another rank of this machine begins a new one
                told = self._read(path)
                if told is not None and told["run"] == self._run:
                    found[told["step"], told["ranks"], rank] = slot
        return found

    def told(self, rank: int, slot: int) -> dict[str, Any]:
        """What lies beside a copy's bytes."""
        told = self._read(self.path / f"{rank}.{slot}.json")
        assert told is not None  # `copies` has found it
        return told

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Read a manifest; None, with a warning, when this run has not signed it."""
        signature, _, text = path.read_bytes().partition(b"\n")
        if not hmac.compare_digest(signature, sign(self._key, path.name, text).encode()):
            logger.warning("%s is not signed by this run; the copy is ignored", path)
            return None
        told: dict[str, Any] = json.loads(text)
        return told

    def boxes(self, rank: int, slot: int) -> dict[str, Sharded]:
        """What a copy holds, in place."""
        data, empty = self.data(rank, slot), dict[str, Sharded]()
        for key, shape, offset, size, dtype in json.loads(bytes(data[self.told(rank, slot)["room"] :].numpy())):
            box = Box(tuple(offset), torch.empty(size, dtype=DTYPES[dtype], device="meta"))
            empty.setdefault(key, Sharded(tuple(shape), [])).boxes.append(box)
        held = {key: Sharded(sharded.shape, []) for key, sharded in empty.items()}
        for key, box, place in laid_out(empty, data):
            held[key].boxes.append(Box(box.offset, place))
        return held

    def data(self, rank: int, slot: int, size: int | None = None) -> Tensor:
        """The file as memory, uint8 [size], of a new copy or, without a size, of one that is there.

        Raises:
            ConfigError: when there is no room.
        """
        path = self.path / f"{rank}.{slot}"
        if size is None:
            size = path.stat().st_size
        else:
            check_private(self.path)
            (self.path / f"{rank}.{slot}.json").unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600), "ab") as stream:
                try:
                    stream.truncate(size)
                    os.posix_fallocate(stream.fileno(), 0, max(1, size))
                except OSError as error:
                    path.unlink()
                    rule = f"no room in {self.path.parent} for a copy of {human(size)}B: {error.strerror}"
                    raise ConfigError(f"checkpoint.memory_every: {rule}", hint="make that larger, or set 0") from error
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def conclude(self, rank: int, slot: int, told: Mapping[str, Any]) -> None:
        """A copy is whole; what is told beside it is that of `told`."""
        path, text = self.path / f"{rank}.{slot}.json", json.dumps({**told, "run": self._run}).encode()
        with atomic_file(path) as stream:
            stream.write(sign(self._key, path.name, text).encode() + b"\n" + text)

    def remove_copies(self) -> None:
        """Remove all copies; the folder and its lock stay."""
        for path in self.path.glob("[0-9]*"):
            path.unlink(missing_ok=True)


class Memory:
    """The copies of one run, as one rank sees them; every rank makes one.

    Args:
        output: the run's folder.
        world: all ranks.
        environment: of a rank that torchrun has started.
        launcher: the process that outlives this rank.
        root: of the folders.
    """

    def __init__(
        self, output: str, world: Group, environment: Mapping[str, str], launcher: int, root: Path = ROOT
    ) -> None:
        self._world, self._leads = world, environment.get("LOCAL_RANK", "0") == "0"
        run = f"{Path(output).resolve()} {environment.get('TORCHELASTIC_RUN_ID')}"
        with raised_alike(world):
            key = load_key(Path(output)) if world.rank == 0 else b""
        key = self._gathered(key)[0]
        self._folder = Folder(folder_path(root, key, launcher), run, key)
        if self._leads:
            sweep_folders(root)
        with raised_alike(world):
            self._lock = claim_folder(self._folder.path, launcher)  # held until this process ends
        here = (socket.gethostname(), str(self._folder.path))
        everyone = self._gathered((here, list(self._folder.copies())))
        nodes, self._copies = [node for node, _ in everyone], [set(copies) for _, copies in everyone]
        self._taker = [_taker(nodes, rank) for rank in range(world.size)]
        self._newest: dict[int, int] = {}  # which of a rank's two copies is not to be written over

    @property
    def ranks(self) -> int:
        """How many there are now."""
        return self._world.size

    def newest(self) -> Whole | None:
        """What all ranks can go on from; None when no step has every rank's copy."""
        there = {copy for copies in self._copies for copy in copies}
        whole = {
            (step, ranks) for step, ranks, _ in there if all((step, ranks, rank) in there for rank in range(ranks))
        }
        if not whole:
            return None
        step, ranks = max(whole)
        own = next((copy for copy in self._copies[self._world.rank] if copy[:2] == (step, ranks)), None)
        state = None if own is None else self._folder.told(own[2], self._folder.copies()[own])["state"]
        return Whole(step, ranks, next(state for state in self._gathered(state) if state is not None))

    def copy(self, whole: Whole) -> Copy:
        """This rank's, of as many ranks as there are now."""
        for rank in range(whole.ranks):
            if (whole.step, whole.ranks, rank) not in self._copies[rank]:
                self._hand_over(whole, rank)
        held = self._folder.copies()
        self._newest = {rank: slot for (*of, rank), slot in held.items() if of == [whole.step, whole.ranks]}
        slot = held[whole.step, whole.ranks, self._world.rank]
        return Copy(whole.step, whole.state, self._folder.data(self._world.rank, slot))

    def shares(self, whole: Whole) -> dict[str, Sharded]:
        """What this rank brings to a checkpoint that is made of copies, whatever ranks there are now."""
        held, tensors = self._folder.copies(), dict[str, Sharded]()
        for rank in range(whole.ranks):
            copy = (whole.step, whole.ranks, rank)
            holders = [index for index, copies in enumerate(self._copies) if copy in copies]
            if holders[rank % len(holders)] == self._world.rank:
                for key, sharded in self._folder.boxes(rank, held[copy]).items():
                    known = tensors.setdefault(key, Sharded(sharded.shape, [])).boxes
                    known += [box for box in sharded.boxes if all(box.offset != other.offset for other in known)]
        return tensors

    def _gathered(self, value: T) -> list[T]:
        """Every rank's."""
        values = [value] * self._world.size
        if self._world.size > 1:
            dist.all_gather_object(values, value, group=self._world.handle)
        return values

    def _hand_over(self, whole: Whole, rank: int) -> None:
        """To a rank that does not find its copy, from the first that has one."""
        copy = (whole.step, whole.ranks, rank)
        holder = next(index for index, copies in enumerate(self._copies) if copy in copies)
        group = self._world.handle
        if self._world.rank == holder:
            slot = self._folder.copies()[copy]
            data = self._folder.data(rank, slot)
            dist.send_object_list([len(data), self._folder.told(rank, slot)], rank, group=group)
            dist.send(data, rank, group=group)
        elif self._world.rank == rank:
            told: list[Any] = [None, None]
            dist.recv_object_list(told, holder, group=group)
            dist.recv(self._folder.data(rank, 0, told[0]), holder, group=group)
            self._folder.conclude(rank, 0, told[1])

    def save(self, step: int, tensors: Mapping[str, Sharded], state: Mapping[str, Any]) -> None:
        """Copy what this rank holds, and take the copies of ranks elsewhere that are this one's to keep.

        Raises:
            ConfigError: on every rank, when there is no room on some.
        """
        own, group, taker = self._world.rank, self._world.handle, self._taker[self._world.rank]
        rooms, boxes = self._gathered(room(tensors)), described(tensors)
        sizes = [begin + count for begin, count in zip(rooms, self._gathered(len(boxes)), strict=True)]
        kept = [own, *(rank for rank, other in enumerate(self._taker) if other == own)]
        slots = {rank: 1 - self._newest.get(rank, 1) for rank in kept}
        with raised_alike(self._world):
            buffers = {rank: self._folder.data(rank, slots[rank], sizes[rank]) for rank in kept}
        for _, box, place in laid_out(tensors, buffers[own]):
            place.copy_(box.tensor.detach())
        buffers[own][rooms[own] :] = boxes
        works = [dist.irecv(buffers[rank], rank, group=group) for rank in kept[1:]]
        works += [] if taker is None else [dist.isend(buffers[own], taker, group=group)]
        for work in works:
            assert work is not None
            work.wait()
        for rank in kept:
            told = {"step": step, "ranks": self._world.size, "room": rooms[rank], "state": state}
            self._folder.conclude(rank, slots[rank], told)
        self._newest = slots

    def clear(self) -> None:
        """Remove the copies: the run has saved, or rolls back."""
        if self._leads:
            self._folder.remove_copies()
        self._newest = {}

    def close(self) -> None:
        """Remove the folder at the end of the run."""
        os.close(self._lock)
        if self._leads:
            shutil.rmtree(self._folder.path, ignore_errors=True)


def described(tensors: Mapping[str, Sharded]) -> Tensor:
    """uint8, JSON: of each box, as `laid_out` gives them, key, global shape, offset, shape and dtype."""
    boxes = [
        [key, list(held.shape), list(box.offset), list(box.tensor.shape), DTYPE_NAMES[box.tensor.dtype]]
        for key, held in tensors.items()
        for box in held.boxes
    ]
    return torch.frombuffer(bytearray(json.dumps(boxes).encode()), dtype=torch.uint8)


def keeps_copies(config: RunConfig, environment: Mapping[str, str]) -> bool:
    """Whether a run keeps copies: where it is asked to, and the launcher of its ranks would start them again."""
    if not config.checkpoint.memory_every:
        return False
    if environment.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        logger.info(
            "checkpoint.memory_every: no copies are kept, as no launcher starts ranks again (torchrun --max-restarts)"
        )
        return False
    return True


def _taker(nodes: Sequence[object], rank: int) -> int | None:
    """The rank on the next node that keeps a copy of a rank's; None where all are on one."""
    order = list(dict.fromkeys(nodes))
    if len(order) == 1:
        return None
    here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    following = order[(order.index(nodes[rank]) + 1) % len(order)]
    there = [other for other, node in enumerate(nodes) if node == following]
    return there[here.index(rank) % len(there)]
