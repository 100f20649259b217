"""Reading a checkpoint: its manifest, and any part of any tensor of it."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.manifest import DTYPES, Chunk, Manifest, TensorEntry
from mega_ckpt.pieces import Box, Shape, copy_overlap
from mega_ckpt.shards import Shard, Slab, check_size
from mega_ckpt.storage import folder_at
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.remote import Place

# What keys of tensors begin with; the last are a HuggingFace folder's that are no weights.
WEIGHTS, OPTIMIZER, BUFFERS = "weights/", "optimizer/", "hf/"
AVERAGE = OPTIMIZER + "ema/"  # of weights, as `train.ema` makes it
# A run of a thousand ranks leaves thousands of shards; a process may often open no more than 1,024 files.
MAX_OPEN_SHARDS = 128


class Checkpoint:
    """An open checkpoint. Files are mapped when first touched; reading a part reads the bytes of that part.

    With `verify`, each chunk that is touched is read whole, once, and compared with its checksum.

    Attributes:
        folder: where the manifest is.
        files: where what it names is: there too, or on an object store one below.
    """

    def __init__(self, folder: Place, manifest: Manifest, *, verify: bool = True) -> None:
        self.folder, self.manifest, self.verify = folder, manifest, verify
        self.files = folder / manifest.folder if manifest.folder else folder
        self._storage = folder_at(self.files)
        self._shards: dict[str, Shard] = {}
        self._verified: set[tuple[str, int]] = set()
        self._layout: dict[str, list[tuple[Chunk, Slab]]] = defaultdict(list)
        for key, tensor in manifest.tensors.items():
            for chunk in tensor.chunks:
                slab = Slab(key, DTYPES[tensor.dtype], tensor.shape, chunk.offset, chunk.shape)
                self._layout[chunk.file].append((chunk, slab))
        for held in self._layout.values():
            held.sort(key=lambda pair: (pair[0].begin, pair[0].end, pair[1].order))

    @classmethod
    def open(cls, folder: Place, *, verify: bool = True) -> Checkpoint:
        """Read and check the manifest, and that every file is there with its full length.

        Raises:
            CheckpointError: when `folder` is not a complete checkpoint.
        """
        checkpoint = cls(folder, Manifest.read(folder), verify=verify)
        checkpoint._storage.look()
        for name in checkpoint.manifest.files:
            checkpoint.check_file(name)
        return checkpoint

    def check_file(self, name: str) -> None:
        """Check that a file is there, is a plain one, and has its full length.

        Raises:
            CheckpointError: when not, naming what the file holds.
        """
        keys = list(dict.fromkeys(key for key, _ in self.chunks_in(name)))
        check_size(self.files / name, partial(self._storage.size, name), self.manifest.files[name], keys)

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return self.manifest.step

    @property
    def model(self) -> ModelConfig:
        """What the model is."""
        return self.manifest.model

    @property
    def state(self) -> dict[str, Any]:
        """What the trainer wrote beside the tensors."""
        return dict(self.manifest.state)

    @property
    def assets(self) -> Place | None:
        """The folder of files that came along (tokenizer and so on), when there are any."""
        return self.files / "assets" if any(name.startswith("assets/") for name in self.manifest.files) else None

    def keys(self, prefix: str = "") -> list[str]:
        """The tensors' names that start with `prefix`, sorted."""
        return sorted(key for key in self.manifest.tensors if key.startswith(prefix))

    def entry(self, key: str) -> TensorEntry:
        """What the manifest says of a tensor.

        Raises:
            CheckpointError: when there is no such tensor.
        """
        if key not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder}: there is no tensor {key} in it")
        return self.manifest.tensors[key]

    def shape(self, key: str) -> Shape:
        """Global shape of a tensor."""
        return self.entry(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """Type of a tensor's elements."""
        return DTYPES[self.entry(key).dtype]

    def read(self, key: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """Read the box [offset, offset + shape) of a tensor, by default the whole, into new host memory.

        Raises:
            CheckpointError: when there is no such tensor or the bytes are damaged.
        """
        whole = self.shape(key)
        offset = offset or (0,) * len(whole)
        shape = tuple(n - o for n, o in zip(whole, offset, strict=True)) if shape is None else shape
        box = Box(offset, torch.empty(shape, dtype=self.dtype(key)))
        for chunk in self.entry(key).chunks:
            if _touch(offset, shape, chunk):
                copy_overlap(box, Box(chunk.offset, self.chunk(key, chunk)))
        return box.tensor

    def chunk(self, key: str, chunk: Chunk) -> Tensor:
        """One chunk of a tensor, mapped, not copied.

        Raises:
            CheckpointError: when its file or its bytes are damaged.
        """
        fresh = (chunk.file, chunk.begin) not in self._verified
        view = self._shard(chunk.file).view(key, self.dtype(key), chunk, verify=self.verify and fresh)
        self._verified.add((chunk.file, chunk.begin))
        return view

    def chunks_in(self, name: str) -> list[tuple[str, Chunk]]:
        """The chunks that a file holds, in its order, with the keys of their tensors."""
        return [(slab.key, chunk) for chunk, slab in self._layout[name]]

    def _shard(self, name: str) -> Shard:
        if name not in self._shards:
            self.check_file(name)
            if len(self._shards) >= MAX_OPEN_SHARDS:
                del self._shards[next(iter(self._shards))]
            held = self._layout[name]
            first_byte, slabs = held[0][0].begin, [slab for _, slab in held]
            self._shards[name] = Shard(self.files / name, slabs, first_byte)
        return self._shards[name]


def _touch(offset: Shape, shape: Shape, chunk: Chunk) -> bool:
    return all(a < o + n and o < a + m for a, m, o, n in zip(offset, shape, chunk.offset, chunk.shape, strict=True))
