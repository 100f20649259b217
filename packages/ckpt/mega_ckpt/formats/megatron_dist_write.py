"""Writing Megatron's `torch_dist` folders, a block of a tensor at a time; `megatron_dist` says what they are."""

from __future__ import annotations

import json
import pickle
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

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

from mega_ckpt.formats.dcp import METADATA
from mega_ckpt.formats.megatron_dist import COMMON, FORMAT
from mega_ckpt.formats.megatron_names import (
    EXPERTS,
    HEAD_STATES,
    STACKS,
    Part,
    depth,
    is_hybrid,
    is_projection,
    split_layer,
)
from mega_ckpt.formats.megatron_write import RELEASE, Writing, durable
from mega_ckpt.formats.torch_archive import load_archive
from mega_ckpt.journal import Finished, Once, entry_of
from mega_ckpt.pieces import Shape
from mega_ckpt.shards import Slab, groups, raw
from mega_ckpt.source import put_file
from mega_ckpt.stream import slabs_of
from mega_common.model_config import ModelConfig

BYTES_PER_FILE = 4 << 30
ALIGNMENT = 64  # of storages in an archive


def write_dist(writing: Writing, folder: Path, advance: Callable[[int], object], once: Once) -> None:
    """Write tensors, settings and metadata into an existing folder; durable when this returns."""
    slabs = [slab for part in writing.parts for slab in slabs_of(part.name, writing.dtype(part), part.shape)]
    chunks: defaultdict[str, list[tuple[Slab, _StorageInfo]]] = defaultdict(list)
    files = list(groups(slabs, BYTES_PER_FILE))
    for number, group in enumerate(files):
        name = f"__0_{number}.distcp"
        done = once(f"{RELEASE}/{name}", b"", partial(_write_file, writing, folder / name, group, advance))
        for slab, (begin, end) in zip(group, done.places, strict=True):
            chunks[slab.key].append((slab, _StorageInfo(name, begin, end - begin)))
    nothing = _write_nothing(folder / f"__0_{len(files)}.distcp")
    with durable(folder / METADATA) as stream:
        pickle.dump(_metadata(writing, chunks, nothing), stream)
    with durable(folder / COMMON) as stream:
        torch.save({"args": Namespace(**writing.args), "checkpoint_version": 3.0, "iteration": 0}, stream)
    versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    put_file(folder / FORMAT, json.dumps({**versions, "common_backend": "torch", "common_backend_version": 1}).encode())


def _write_file(writing: Writing, path: Path, slabs: Sequence[Slab], advance: Callable[[int], object]) -> Finished:
    """One archive after another."""
    parts, places = {part.name: part for part in writing.parts}, []
    with durable(path) as stream:
        for slab in slabs:
            part = parts[slab.key]
            extent = _Stack.of(part, writing.model).extent(slab.shape)
            places.append(_add(stream, path, writing.block(part, slab.offset, slab.shape).view(extent)))
            advance(slab.nbytes)
    return Finished(file=entry_of(path), places=tuple(places))


def _add(stream: IO[bytes], path: Path, tensor: Tensor) -> tuple[int, int]:
    """Append what `torch.save` makes of a contiguous tensor, without the checksum that nobody reads; returns where it is."""
    # Aligned as it is inside the archive, a tensor can be mapped where it lies.
    stream.write(bytes(-stream.tell() % ALIGNMENT))
    begin = stream.tell()
    with torch.serialization.skip_data():
        torch.save(tensor, stream)
    end = stream.tell()
    stream.flush()
    stream.seek(load_archive(path, begin, end).begin)
    stream.write(raw(tensor))
    stream.seek(end)
    return begin, end


def _write_nothing(path: Path) -> _StorageInfo:
    with durable(path) as stream:
        torch.save([None], stream)
        return _StorageInfo(path.name, 0, stream.tell())


@dataclass(frozen=True)
class _Stack:
    """The layer that a tensor is of, among as many that are alike; none for tensors that stand by themselves."""

    layer: int | None
    layers: int
    taps: bool
    name: str

    @classmethod
    def of(cls, part: Part, model: ModelConfig) -> _Stack:
        head, _ = split_layer(part.name)
        alike = len(set(model.kinds[: model.num_layers])) == 1 and not is_hybrid(model)
        stack = next((stack for stack in STACKS if head.startswith(stack)), "") if alike else ""
        layer = int(head.split(".")[2]) if stack else None
        return cls(layer, depth(model, stack), part.taps, stack)

    def keys(self, part: Part, *, latent: bool) -> list[str]:
        """The names of a tensor: some have another in other kinds of layers, and get both."""
        head, tail = split_layer(part.name)
        tails = dict.fromkeys([tail, part.te or tail, *([part.local or tail] if latent else [])])
        names = [(self.name or head) + name for name in tails]
        return [*names, part.also] if part.also else names

    def whole(self, shape: Shape) -> Shape:
        return self._with(self.layers, 1, shape)

    def extent(self, shape: Shape) -> Shape:
        return self._with(1, 1, shape)

    def place(self, offset: Shape) -> Shape:
        return self._with(self.layer or 0, 0, offset)

    def _with(self, layer: int, middle: int, numbers: Shape) -> Shape:
        """Sizes or places, with those of the axes that only Megatron has."""
        if self.taps:
            numbers = (numbers[0], middle, *numbers[1:])
        return numbers if self.layer is None else (layer, *numbers)

    def states(self, key: str, part: Part) -> Iterator[str]:
        """Where Transformer Engine's state of the module would be, of each expert by itself."""
        module, _, rest = key.partition(".weight")
        norm = key.endswith(("norm.weight", ".softmax_offset")) and not key.endswith(".mixer.norm.weight")
        if not is_projection(f"{module}.weight") and not norm:
            return
        experts = part.shape[0] if EXPERTS in key else 0
        for expert in range(experts) if experts else (None,):
            axes = [(self.layer, self.layers)] * (self.layer is not None) + [(expert, experts)] * (expert is not None)
            offset, shape = (".".join(map(str, numbers)) for numbers in zip(*(axes or [(0, 1)]), strict=True))
            yield f"{module if rest else key.rpartition('.')[0]}._extra_state/shard_{offset}_{shape}"


def _metadata(
    writing: Writing, chunks: Mapping[str, Sequence[tuple[Slab, _StorageInfo]]], nothing: _StorageInfo
) -> Metadata:
    """What is where: each tensor in its chunks, and `nothing` in place of each state."""
    metadata = Metadata({}, storage_data={})
    for part in writing.parts:
        stack = _Stack.of(part, writing.model)
        for there in stack.keys(part, latent=writing.model.mla is not None):
            kind, shape = writing.dtype(part), torch.Size(stack.whole(part.shape))
            fresh = TensorStorageMetadata(TensorProperties(dtype=kind), shape, [])
            one = metadata.state_dict_metadata.setdefault(there, fresh)
            assert isinstance(one, TensorStorageMetadata)
            for slab, info in chunks[part.name]:
                offset = torch.Size(stack.place(slab.offset))
                one.chunks.append(ChunkStorageMetadata(offset, torch.Size(stack.extent(slab.shape))))
                metadata.storage_data[MetadataIndex(there, offset)] = info
            for state in stack.states(there, part):
                metadata.state_dict_metadata[state] = BytesStorageMetadata()
                metadata.storage_data[MetadataIndex(state)] = nothing
    model = writing.model
    if (
        is_hybrid(model) or model.encoder or not model.causal
    ):  # whose loading, other than a GPT's, is strict about these too
        for name in HEAD_STATES if model.encoder else HEAD_STATES[:1]:
            state = f"{name}/shard_0_1"
            metadata.state_dict_metadata[state] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(state)] = nothing
    return metadata
