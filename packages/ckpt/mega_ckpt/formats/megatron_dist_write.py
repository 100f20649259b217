"""Writing Megatron's `torch_dist` folders, a block of a tensor at a time; `megatron_dist` says what they are."""

from __future__ import annotations

import json
import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mega_ckpt.formats.megatron_dist import COMMON, FORMAT, METADATA
from mega_ckpt.formats.megatron_names import EXPERTS, LAYER, Part, is_projection, split_layer
from mega_ckpt.formats.megatron_write import Writing, durable
from mega_ckpt.formats.torch_archive import load_archive
from mega_ckpt.pieces import Shape
from mega_ckpt.shards import raw
from mega_ckpt.source import put_file
from mega_ckpt.stream import blocks
from mega_common.model_config import ModelConfig

BYTES_PER_FILE = 4 << 30
ALIGNMENT = 64  # of storages in an archive


def write_dist(writing: Writing, folder: Path, advance: Callable[[int], object]) -> None:
    """Write tensors, settings and metadata into an existing empty folder; durable when this returns."""
    metadata = Metadata({}, storage_data={})
    with _Files(folder) as files:
        nothing = files.add_object([None])
        for part in writing.parts:
            stack = _Stack.of(part, writing.model)
            keys, kind = stack.keys(part, latent=writing.model.mla is not None), writing.dtype(part)
            chunks = []
            for offset, shape in blocks(part.shape, kind):
                data = writing.block(part, offset, shape)
                chunks.append(
                    (stack.place(offset), stack.extent(shape), files.add_tensor(data.view(stack.extent(shape))))
                )
                advance(data.nbytes)
            for key in keys:
                _describe(metadata, key, kind, stack.whole(part.shape), chunks)
                for state in stack.states(key, part):
                    metadata.state_dict_metadata[state] = BytesStorageMetadata()
                    metadata.storage_data[MetadataIndex(state)] = nothing
    with durable(folder / METADATA) as stream:
        pickle.dump(metadata, stream)
    with durable(folder / COMMON) as stream:
        torch.save({"args": Namespace(**writing.args), "checkpoint_version": 3.0, "iteration": 0}, stream)
    versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    put_file(folder / FORMAT, json.dumps({**versions, "common_backend": "torch", "common_backend_version": 1}).encode())


@dataclass(frozen=True)
class _Stack:
    """The layer that a tensor is of, among as many that are alike; none for tensors that stand by themselves."""

    layer: int | None
    layers: int

    @classmethod
    def of(cls, part: Part, model: ModelConfig) -> _Stack:
        head, _ = split_layer(part.name)
        alike = len({model.has_experts(layer) for layer in range(model.num_layers)}) == 1
        return cls(int(head.split(".")[2]) if head and alike else None, model.num_layers)

    def keys(self, part: Part, *, latent: bool) -> list[str]:
        """The names of a tensor: some have another in other kinds of layers, and get both."""
        head, tail = split_layer(part.name)
        tails = dict.fromkeys([tail, part.te or tail, *([part.local or tail] if latent else [])])
        return [(head if self.layer is None else LAYER) + name for name in tails]

    def whole(self, shape: Shape) -> Shape:
        return shape if self.layer is None else (self.layers, *shape)

    def extent(self, shape: Shape) -> Shape:
        return shape if self.layer is None else (1, *shape)

    def place(self, offset: Shape) -> Shape:
        return offset if self.layer is None else (self.layer, *offset)

    def states(self, key: str, part: Part) -> Iterator[str]:
        """Where Transformer Engine's state of the module would be, of each expert by itself."""
        if not is_projection(key) and not key.endswith(("norm.weight", ".softmax_offset")):
            return
        experts = part.shape[0] if EXPERTS in key else 0
        for expert in range(experts) if experts else (None,):
            axes = [(self.layer, self.layers)] * (self.layer is not None) + [(expert, experts)] * (expert is not None)
            offset, shape = (".".join(map(str, numbers)) for numbers in zip(*(axes or [(0, 1)]), strict=True))
            yield f"{key.rpartition('.')[0]}._extra_state/shard_{offset}_{shape}"


def _describe(
    metadata: Metadata, key: str, kind: torch.dtype, shape: Shape, chunks: list[tuple[Shape, Shape, _StorageInfo]]
) -> None:
    fresh = TensorStorageMetadata(TensorProperties(dtype=kind), torch.Size(shape), [])
    one = metadata.state_dict_metadata.setdefault(key, fresh)
    assert isinstance(one, TensorStorageMetadata)
    for offset, extent, info in chunks:
        one.chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(extent)))
        metadata.storage_data[MetadataIndex(key, torch.Size(offset))] = info


class _Files:
    """Archives one after another, in files of a bounded size."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._stream: IO[bytes] | None = None

    def add_object(self, value: Any) -> _StorageInfo:
        """Append what `torch.save` makes of a value; returns where it is."""
        stream, begin = self._next()
        torch.save(value, stream)
        return _StorageInfo(Path(stream.name).name, begin, stream.tell() - begin)

    def add_tensor(self, tensor: Tensor) -> _StorageInfo:
        """The same for a contiguous tensor, without the checksum that nobody reads."""
        with torch.serialization.skip_data():
            info = self.add_object(tensor)
        assert self._stream is not None
        end = self._stream.tell()
        self._stream.flush()
        self._stream.seek(load_archive(self._folder / info.relative_path, info.offset, end).begin)
        self._stream.write(raw(tensor))
        self._stream.seek(end)
        return info

    def _next(self) -> tuple[IO[bytes], int]:
        """The file to append to, and where that is."""
        if self._stream is None or self._stream.tell() > BYTES_PER_FILE:
            self.close()
            self._stream = open(self._folder / f"__0_{self._count}.distcp", "xb")  # noqa: SIM115
            self._count += 1
        # Aligned as it is inside the archive, a tensor can be mapped where it lies.
        self._stream.write(bytes(-self._stream.tell() % ALIGNMENT))
        return self._stream, self._stream.tell()

    def close(self) -> None:
        """Make the last file durable."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
