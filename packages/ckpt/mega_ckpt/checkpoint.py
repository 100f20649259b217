"""Open checkpoint: its manifest, and random access to any part of any tensor."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.manifest import DTYPES, Manifest, ManifestTensorEntry, TensorChunk
from mega_ckpt.shard_files import ShardFile, UnwrittenTensorChunk, check_file_size
from mega_ckpt.storage import open_storage_folder
from mega_ckpt.tensor_pieces import TensorBox, TensorShape, compute_slice_overlap, copy_overlap
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location

# Prefixes of tensor keys; the last one is of buffers of a HuggingFace folder.
WEIGHTS, OPTIMIZER, BUFFERS = "weights/", "optimizer/", "hf/"
AVERAGE = OPTIMIZER + "ema/"  # exponential moving average of the weights (`train.ema`)
# A run of a thousand ranks writes thousands of shards; the limit of open files is often 1,024.
MAX_OPEN_SHARDS = 128


class Checkpoint:
    """Open mega checkpoint: its manifest, and random access to any part of any tensor.

    Files are mapped when first accessed; reading a slice reads only the bytes of that slice.

    With `verify`, each chunk that is accessed is read whole, once, and compared with its checksum.

    Attributes:
        folder: folder of the manifest.
        files: folder of the files in the manifest: `folder`, or on an object store a subfolder of it.
    """

    def __init__(self, folder: Location, manifest: Manifest, *, verify: bool = True) -> None:
        self.folder, self.manifest, self.verify = folder, manifest, verify
        self.files = folder / manifest.folder if manifest.folder else folder
        self._storage = open_storage_folder(self.files)
        self._shards: dict[str, ShardFile] = {}
        self._verified: set[tuple[str, int]] = set()
        self._layout: dict[str, list[tuple[TensorChunk, UnwrittenTensorChunk]]] = defaultdict(list)
        for key, tensor in manifest.tensors.items():
            for chunk in tensor.chunks:
                slab = UnwrittenTensorChunk(key, DTYPES[tensor.dtype], tensor.shape, chunk.offset, chunk.shape)
                self._layout[chunk.file].append((chunk, slab))
        for chunks in self._layout.values():
            chunks.sort(key=lambda pair: (pair[0].begin, pair[0].end, pair[1].sort_key))

    @classmethod
    def open_folder(cls, folder: Location, *, verify: bool = True) -> Checkpoint:
        """Open the mega checkpoint in `folder`, with checks of its manifest and files.
        Every file must exist with its full length. With `verify`, chunks are checked against their checksums when they
        are read.

        Raises:
            CheckpointError: when `folder` is not a complete checkpoint.
        """
        checkpoint = cls(folder, Manifest.read_from_folder(folder), verify=verify)
        checkpoint._storage.cache_sizes()
        for name in checkpoint.manifest.files:
            checkpoint.check_file_in_manifest(name)
        return checkpoint

    def check_file_in_manifest(self, name: str) -> None:
        """Check that a file of the checkpoint exists, is a regular file, and has the length in the manifest.

        Raises:
            CheckpointError: otherwise, naming the tensors in the file.
        """
        keys = list(dict.fromkeys(key for key, _ in self.chunks_in_file(name)))
        check_file_size(self.files / name, partial(self._storage.file_size, name), self.manifest.files[name], keys)

    @property
    def step(self) -> int:
        """Number of optimizer steps done when the checkpoint was saved, which also names its folder."""
        return self.manifest.step

    @property
    def model(self) -> ModelConfig:
        """Configuration of the model whose tensors the checkpoint contains."""
        return self.manifest.model

    @property
    def trainer_state(self) -> dict[str, Any]:
        """JSON state that the trainer saved in the checkpoint's manifest, next to the tensors."""
        return dict(self.manifest.state)

    @property
    def assets_folder(self) -> Location | None:
        """Folder of the checkpoint's asset files (tokenizer and so on), or None if there are none."""
        return self.files / "assets" if any(name.startswith("assets/") for name in self.manifest.files) else None

    def tensor_keys(self, prefix: str = "") -> list[str]:
        """Return the sorted keys of the checkpoint's tensors that start with `prefix`."""
        return sorted(key for key in self.manifest.tensors if key.startswith(prefix))

    def tensor_entry(self, key: str) -> ManifestTensorEntry:
        """Return a tensor's record in the manifest: dtype, shape, and the stored chunks that it consists of.

        Raises:
            CheckpointError: when the tensor is missing.
        """
        if key not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder}: the tensor {key} is missing")
        return self.manifest.tensors[key]

    def tensor_shape(self, key: str) -> TensorShape:
        """Return the global (unsharded) shape of a tensor of the checkpoint."""
        return self.tensor_entry(key).shape

    def tensor_dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor of the checkpoint."""
        return DTYPES[self.tensor_entry(key).dtype]

    def read_tensor(self, key: str, offset: TensorShape | None = None, shape: TensorShape | None = None) -> Tensor:
        """Read the slice [offset, offset + shape) of a tensor of the checkpoint into new host memory.
        By default the whole tensor is read.

        Raises:
            CheckpointError: when the tensor is missing, or the bytes are damaged.
        """
        whole = self.tensor_shape(key)
        offset = offset or (0,) * len(whole)
        shape = tuple(n - o for n, o in zip(whole, offset, strict=True)) if shape is None else shape
        box = TensorBox(offset, torch.empty(shape, dtype=self.tensor_dtype(key)))
        for chunk in self.tensor_entry(key).chunks:
            if compute_slice_overlap(offset, shape, chunk.offset, chunk.shape):
                copy_overlap(box, TensorBox(chunk.offset, self.mmap_tensor_chunk(key, chunk)))
        return box.tensor

    def mmap_tensor_chunk(self, key: str, chunk: TensorChunk) -> Tensor:
        """Return one stored chunk of a tensor as a memory-mapped view of its file, without a copy.

        Raises:
            CheckpointError: when its file or its bytes are damaged.
        """
        fresh = (chunk.file, chunk.begin) not in self._verified
        view = self._shard(chunk.file).read_chunk(key, self.tensor_dtype(key), chunk, verify=self.verify and fresh)
        self._verified.add((chunk.file, chunk.begin))
        return view

    def chunks_in_file(self, name: str) -> list[tuple[str, TensorChunk]]:
        """Return (tensor key, chunk) for each tensor chunk in a file, in file order."""
        return [(slab.key, chunk) for chunk, slab in self._layout[name]]

    def _shard(self, name: str) -> ShardFile:
        if name not in self._shards:
            self.check_file_in_manifest(name)
            if len(self._shards) >= MAX_OPEN_SHARDS:
                del self._shards[next(iter(self._shards))]
            chunks = self._layout[name]
            first_byte, slabs = chunks[0][0].begin, [slab for _, slab in chunks]
            self._shards[name] = ShardFile(self.files / name, slabs, first_byte)
        return self._shards[name]
