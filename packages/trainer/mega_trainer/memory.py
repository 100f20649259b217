"""Copies of the state in host memory, from which ranks that their launcher starts again go on (GEMINI, SOSP 2023).

    /dev/shm/mega-<launcher's process>/<rank>.<0 or 1>         what a rank holds, box after box
    /dev/shm/mega-<launcher's process>/<rank>.<0 or 1>.json    written last: of which run and step, and the numbers beside it

A launcher outlives its ranks, and with it these files. Each rank keeps its own last two copies, for some may have made one
more than others when one of them dies; where there are several launchers, so several machines, a copy goes to a rank of the
next one, too. All ranks go on from the newest step of which every rank's copy is somewhere, if that is newer than the newest
checkpoint; the number and the layout of the ranks must be those of the copies.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mega_ckpt.pieces import Sharded
from mega_ckpt.staging import laid_out, room
from mega_common.errors import ConfigError
from mega_common.files import atomic_file
from mega_common.log import human, logger
from mega_trainer.comm import Group, raised_alike
from mega_trainer.config import RunConfig
from mega_trainer.ranks import Ranks

ROOT = Path("/dev/shm")


@dataclass(frozen=True)
class Copy:
    """A step that all ranks' copies are there of.

    Attributes:
        step: of it.
        state: the numbers beside the tensors, as in a checkpoint.
        data: uint8, this rank's.
    """

    step: int
    state: Mapping[str, Any]
    data: Tensor

    def fill(self, tensors: Mapping[str, Sharded]) -> None:
        """Copy all boxes from it."""
        assert room(tensors) == len(self.data)
        for _, box, place in laid_out(tensors, self.data):
            box.tensor.copy_(place)


class Folder:
    """The copies in one launcher's folder: of each rank two, of which one may be being written.

    Args:
        path: where.
        run: what run they must be of.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path, self._run = path, run

    def copies(self) -> dict[tuple[int, int], tuple[int, dict[str, Any]]]:
        """Of each (step, rank) that is there: which of the two it is, and the numbers beside it."""
        found = {}
        for path in sorted(self.path.glob("*.json")):
            rank, slot = map(int, path.stem.split("."))
            with contextlib.suppress(FileNotFoundError):  # another rank of this machine begins a new one
                told = json.loads(path.read_text())
                if told["run"] == self._run:
                    found[told["step"], rank] = slot, told["state"]
        return found

    def data(self, rank: int, slot: int, size: int | None = None) -> Tensor:
        """The file as memory, uint8 [size], of a new copy or, without a size, of one that is there.

        Raises:
            ConfigError: when there is no room.
        """
        path = self.path / f"{rank}.{slot}"
        if size is None:
            size = path.stat().st_size
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / f"{rank}.{slot}.json").unlink(missing_ok=True)
            with open(path, "ab") as stream:
                try:
                    stream.truncate(size)
                    os.posix_fallocate(stream.fileno(), 0, max(1, size))
                except OSError as error:
                    path.unlink()
                    rule = f"no room in {self.path.parent} for a copy of {human(size)}B: {error.strerror}"
                    raise ConfigError(f"checkpoint.memory_every: {rule}", hint="make that larger, or set 0") from error
        return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

    def conclude(self, rank: int, slot: int, step: int, state: Mapping[str, Any]) -> None:
        """A copy is whole."""
        with atomic_file(self.path / f"{rank}.{slot}.json", text=True) as stream:
            json.dump({"run": self._run, "step": step, "state": state}, stream)


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
        run = f"{Path(output).resolve()} {environment.get('TORCHELASTIC_RUN_ID')} {world.size}"
        self._folder = Folder(root / f"mega-{launcher}", run)
        if self._leads:
            _sweep(root)
        own = {copy: state for copy, (_, state) in self._folder.copies().items()}
        here = (socket.gethostname(), str(self._folder.path))
        everyone = [(here, own)] * world.size
        dist.all_gather_object(everyone, (here, own), group=world.handle)
        nodes, self._copies = [node for node, _ in everyone], [copies for _, copies in everyone]
        self._taker = [_taker(nodes, rank) for rank in range(world.size)]
        self._newest: dict[int, int] = {}  # which of a rank's two copies is not to be written over

    def newest(self) -> Copy | None:
        """What all ranks go on from, the same step on each; None when no step has every rank's copy."""
        ranks, own = range(self._world.size), self._world.rank
        there = {copy for copies in self._copies for copy in copies}
        step = max((step for step, _ in there if all((step, rank) in there for rank in ranks)), default=None)
        if step is None:
            return None
        for rank in ranks:
            if (step, rank) not in self._copies[rank]:
                self._hand_over(step, rank)
        held = self._folder.copies()
        self._newest = {rank: slot for (of, rank), (slot, _) in held.items() if of == step}
        slot, state = held[step, own]
        return Copy(step, state, self._folder.data(own, slot))

    def _hand_over(self, step: int, rank: int) -> None:
        """To a rank that does not find its copy, from the first that has one."""
        holder = next(index for index, copies in enumerate(self._copies) if (step, rank) in copies)
        if self._world.rank == holder:
            data = self._folder.data(rank, self._folder.copies()[step, rank][0])
            dist.send(torch.tensor([len(data)]), rank, group=self._world.handle)
            dist.send(data, rank, group=self._world.handle)
        elif self._world.rank == rank:
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, holder, group=self._world.handle)
            dist.recv(self._folder.data(rank, 0, int(size)), holder, group=self._world.handle)
            self._folder.conclude(rank, 0, step, self._copies[holder][step, rank])

    def save(self, step: int, tensors: Mapping[str, Sharded], state: Mapping[str, Any]) -> None:
        """Copy what this rank holds, and take the copies of ranks elsewhere that are this one's to keep.

        Raises:
            ConfigError: on every rank, when there is no room on some.
        """
        own, group, sizes = self._world.rank, self._world.handle, [0] * self._world.size
        dist.all_gather_object(sizes, room(tensors), group=group)
        kept = [own, *(rank for rank, taker in enumerate(self._taker) if taker == own)]
        slots = {rank: 1 - self._newest.get(rank, 1) for rank in kept}
        with raised_alike(self._world):
            buffers = {rank: self._folder.data(rank, slots[rank], sizes[rank]) for rank in kept}
        for _, box, place in laid_out(tensors, buffers[own]):
            place.copy_(box.tensor.detach())
        taker = self._taker[own]
        works = [dist.irecv(buffers[rank], rank, group=group) for rank in kept[1:]]
        works += [] if taker is None else [dist.isend(buffers[own], taker, group=group)]
        for work in works:
            assert work is not None
            work.wait()
        for rank in kept:
            self._folder.conclude(rank, slots[rank], step, state)
        self._newest = slots

    def clear(self) -> None:
        """The run has saved, or goes back: no copy is of use any more."""
        if self._leads:
            shutil.rmtree(self._folder.path, ignore_errors=True)
        self._newest = {}


def keeps_copies(config: RunConfig, ranks: Ranks, environment: Mapping[str, str]) -> bool:
    """Whether a run keeps copies: where it is asked to, and the launcher of its ranks would start them again."""
    if not config.checkpoint.memory_every:
        return False
    if ranks.world_size == 1 or environment.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
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


def _sweep(root: Path) -> None:
    """Remove the folders of launchers that are no more."""
    for path in root.glob("mega-*"):
        if (
            path.name.removeprefix("mega-").isdecimal()
            and not Path(f"/proc/{path.name.removeprefix('mega-')}").exists()
        ):
            shutil.rmtree(path, ignore_errors=True)
