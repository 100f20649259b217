"""Tensors as they lie on disk, whatever kind of file that is, and a source of canonical tensors made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_ckpt.families.layouts import DiskTensor, Slab
from mega_ckpt.names import tensors_of
from mega_ckpt.pieces import Box, Shape, copy_overlap, crop
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.remote import Place


@dataclass(frozen=True)
class Stored:
    """A tensor on disk.

    Attributes:
        path: the file it is in.
        dtype: of what `read` gives.
        shape: the same.
        read: gives the whole tensor, as a view of the file where it can be.
        costly: whether reading fetches or computes the tensor, so that it is kept until the next one is read.
    """

    path: Place
    dtype: torch.dtype
    shape: Shape
    read: Callable[[], Tensor]
    costly: bool = False


class DiskSource:
    """Weights in files that hold them under names and in layouts of their own. One costly tensor is in memory at a time.

    `quantised` tells how those are that are not stored as they are read.

    Raises:
        CheckpointError: from the constructor, when parts of one canonical tensor have two dtypes.
    """

    def __init__(
        self,
        place: Place,
        model: ModelConfig,
        table: Mapping[str, DiskTensor],
        disk: Mapping[str, Stored],
        quantised: str | None = None,
    ) -> None:
        self.place, self.quantised = place, quantised
        self.model: ModelConfig = model
        self._disk = disk
        self._shapes = tensors_of(model)
        self._places = _places(table)
        self._buffers = [name for name in disk if name not in table]
        self._kept: dict[str, Tensor] = {}
        self._check_dtypes()

    def files(self) -> Sequence[Place]:
        """The files that hold the tensors."""
        return sorted({stored.path for stored in self._disk.values()}, key=str)

    def keys(self) -> Sequence[str]:
        """Canonical names, in the order of the forward pass."""
        return list(self._shapes)

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Its stored dtype; of a quantised one that which it is read in."""
        disk, _ = self._places[name][0]
        return self._disk[disk.name].dtype

    def read(self, name: str) -> Tensor:
        """The whole tensor: a view of the file, unless it is assembled from several."""
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A rectangle of it: a view of the file, unless it is assembled from several tensors there."""
        places = self._places[name]
        if len(places) == 1:
            return crop(self._view(*places[0]), offset, shape)
        out = torch.empty(shape, dtype=self.dtype(name))
        for disk, slab in places:
            if all(a < b + n and b < a + m for a, m, b, n in zip(offset, shape, slab.offset, slab.shape, strict=True)):
                copy_overlap(Box(offset, out), Box(slab.offset, self._view(disk, slab)))
        return out

    def buffers(self) -> Sequence[str]:
        """Tensors on disk that are no weights."""
        return self._buffers

    def read_buffer(self, name: str) -> Tensor:
        """One of them."""
        return self._disk[name].read()

    def _view(self, disk: DiskTensor, slab: Slab) -> Tensor:
        views = disk.views(self._whole(disk.name))
        return next(view for each, view in views if each == slab)

    def _whole(self, name: str) -> Tensor:
        """A tensor on disk. One that is costly is kept until the next, for it is asked for in blocks."""
        stored = self._disk[name]
        if not stored.costly:
            return stored.read()
        if name not in self._kept:
            self._kept.clear()
            self._kept[name] = stored.read()
        return self._kept[name]

    def _check_dtypes(self) -> None:
        """Experts that are one tensor here have one dtype."""
        for name, places in self._places.items():
            for disk, _ in places:
                if self._disk[disk.name].dtype != self.dtype(name):
                    raise CheckpointError(f"{self.place}: {disk.name} has another dtype than {places[0][0].name}")


def _places(table: Mapping[str, DiskTensor]) -> Mapping[str, list[tuple[DiskTensor, Slab]]]:
    """Where each canonical tensor is: the disk tensors and the slab that each of them holds, without repetition."""
    found: defaultdict[str, dict[Shape, tuple[DiskTensor, Slab]]] = defaultdict(dict)
    for disk in table.values():
        for slab in disk.slabs:
            found[slab.name].setdefault(slab.offset, (disk, slab))
    return {name: list(places.values()) for name, places in found.items()}
