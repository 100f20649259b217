"""Lazily read tensors of any file format, and a weight source that assembles canonical tensors from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.families.disk_layouts import DiskTensor, TensorSlice
from mega_ckpt.tensor_pieces import TensorBox, TensorShape, compute_slice_overlap, copy_overlap, crop_tensor
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk that is read on demand.

    Attributes:
        path: the file it is in.
        dtype: dtype of the tensor that `read` returns.
        shape: its shape.
        read: returns the whole tensor, as a view of the file if possible.
        costly: reading downloads or computes the tensor, so that it is cached until the next one is read.
    """

    path: Location
    dtype: torch.dtype
    shape: TensorShape
    read: Callable[[], Tensor]
    costly: bool = False


class DiskWeightSource:
    """Reader of a model's weights from files that have the tensor names and layouts of its family.
    At most one tensor that is costly to read is kept in memory.

    `quantization` describes the stored weights if they are dequantized when read; else it is None.

    Raises:
        CheckpointError: from the constructor, when parts of one canonical tensor have two dtypes.
    """

    def __init__(
        self,
        path: Location,
        model: ModelConfig,
        table: Mapping[str, DiskTensor],
        disk: Mapping[str, LazyTensor],
        quantization: str | None = None,
    ) -> None:
        self.path, self.quantization = path, quantization
        self.model: ModelConfig = model
        self._disk = disk
        self._shapes = canonical_tensors(model)
        self._locations = _locate_tensors(table)
        self._buffers = [name for name in disk if name not in table]
        self._cached: dict[str, Tensor] = {}
        self._check_dtypes()

    def weight_files(self) -> Sequence[Location]:
        """Return the paths of the files that hold the model's tensors."""
        return sorted({stored.path for stored in self._disk.values()}, key=str)

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical tensor names, in the order of the forward pass."""
        return list(self._shapes)

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global (unsharded) shape of a canonical tensor."""
        return self._shapes[name]

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a canonical tensor; for a quantized one, the dtype after dequantization."""
        disk, _ = self._locations[name][0]
        return self._disk[disk.name].dtype

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole canonical tensor from the weight files.
        It is a view of the file, unless it is assembled from several disk tensors.
        """
        shape = self.tensor_shape(name)
        return self.read_tensor_slice(name, (0,) * len(shape), shape)

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of a canonical tensor from the weight files.
        It is a view of the file, unless it is assembled from several disk tensors.
        """
        locations = self._locations[name]
        if len(locations) == 1:
            return crop_tensor(self._view(*locations[0]), offset, shape)
        out = torch.empty(shape, dtype=self.tensor_dtype(name))
        for disk, slab in locations:
            if compute_slice_overlap(offset, shape, slab.offset, slab.shape):
                copy_overlap(TensorBox(offset, out), TensorBox(slab.offset, self._view(disk, slab)))
        return out

    def buffer_names(self) -> Sequence[str]:
        """Return the names of the tensors on disk that are not weights of the model."""
        return self._buffers

    def read_buffer(self, name: str) -> Tensor:
        """Read one buffer (a tensor that is not a weight), by its name on disk."""
        return self._disk[name].read()

    def _view(self, disk: DiskTensor, slab: TensorSlice) -> Tensor:
        views = disk.slice_views(self._read_disk_tensor(disk.name))
        return next(view for each, view in views if each == slab)

    def _read_disk_tensor(self, name: str) -> Tensor:
        """Read a disk tensor. A costly one is cached until the next one, because it is read in blocks."""
        stored = self._disk[name]
        if not stored.costly:
            return stored.read()
        if name not in self._cached:
            self._cached.clear()
            self._cached[name] = stored.read()
        return self._cached[name]

    def _check_dtypes(self) -> None:
        """Check that all disk tensors of one canonical tensor have the same dtype."""
        for name, locations in self._locations.items():
            dtype = self.tensor_dtype(name)
            for disk, _ in locations:
                if self._disk[disk.name].dtype != dtype:
                    raise CheckpointError(
                        f"{self.path}: the dtype of {disk.name}, {self._disk[disk.name].dtype}, must be that of "
                        f"{locations[0][0].name}, {dtype}"
                    )


def _locate_tensors(table: Mapping[str, DiskTensor]) -> Mapping[str, list[tuple[DiskTensor, TensorSlice]]]:
    """Return the disk tensors and slices that make up each canonical tensor, without duplicates."""
    found: defaultdict[str, dict[TensorShape, tuple[DiskTensor, TensorSlice]]] = defaultdict(dict)
    for disk in table.values():
        for slab in disk.slabs:
            found[slab.name].setdefault(slab.offset, (disk, slab))
    return {name: list(locations.values()) for name, locations in found.items()}
