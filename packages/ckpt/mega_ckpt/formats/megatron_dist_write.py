"""Writer of Megatron's `torch_dist` folders, one block of a tensor at a time; `megatron_dist` describes the format."""

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
    MegatronTensorMapping,
    count_encoder_or_decoder_layers,
    is_hybrid_model,
    is_projection_weight,
    split_megatron_layer_prefix,
)
from mega_ckpt.formats.megatron_write import RELEASE, MegatronWriteInput, open_durable_file
from mega_ckpt.formats.torch_archive import load_torch_archive
from mega_ckpt.resumable_folder import FinishedFile, RunOnce, hash_file
from mega_ckpt.shard_files import UnwrittenTensorChunk, group_chunks_by_file, tensor_bytes
from mega_ckpt.stream_checkpoint import split_tensor_for_checkpoint
from mega_ckpt.tensor_pieces import TensorShape
from mega_ckpt.weight_source import write_file_durably
from mega_common.model_config import ModelConfig

BYTES_PER_FILE = 4 << 30
ALIGNMENT = 64  # of storages in an archive


def write_megatron_dist_checkpoint(
    writing: MegatronWriteInput, folder: Path, advance: Callable[[int], object], once: RunOnce
) -> None:
    """Write a Megatron checkpoint of the format `torch_dist` into an existing folder.
    Tensors, settings and metadata are written. The files are durable when this returns.
    """
    slabs = [
        slab
        for part in writing.parts
        for slab in split_tensor_for_checkpoint(part.name, writing.get_stored_dtype(part), part.shape)
    ]
    chunks: defaultdict[str, list[tuple[UnwrittenTensorChunk, _StorageInfo]]] = defaultdict(list)
    files = list(group_chunks_by_file(slabs, BYTES_PER_FILE))
    for number, group in enumerate(files):
        name = f"__0_{number}.distcp"
        done = once(f"{RELEASE}/{name}", b"", partial(_write_file, writing, folder / name, group, advance))
        for slab, (begin, end) in zip(group, done.places, strict=True):
            chunks[slab.key].append((slab, _StorageInfo(name, begin, end - begin)))
    empty = _write_empty_object(folder / f"__0_{len(files)}.distcp")
    with open_durable_file(folder / METADATA) as stream:
        pickle.dump(_build_metadata(writing, chunks, empty), stream)
    with open_durable_file(folder / COMMON) as stream:
        torch.save({"args": Namespace(**writing.args), "checkpoint_version": 3.0, "iteration": 0}, stream)
    versions = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    write_file_durably(
        folder / FORMAT, json.dumps({**versions, "common_backend": "torch", "common_backend_version": 1}).encode()
    )


def _write_file(
    writing: MegatronWriteInput, path: Path, slabs: Sequence[UnwrittenTensorChunk], advance: Callable[[int], object]
) -> FinishedFile:
    """Write one archive after another."""
    parts, places = {part.name: part for part in writing.parts}, []
    with open_durable_file(path) as stream:
        for slab in slabs:
            part = parts[slab.key]
            extent = _LayerStack.from_part(part, writing.model).chunk_shape(slab.shape)
            places.append(_append_tensor(stream, path, writing.read_block(part, slab.offset, slab.shape).view(extent)))
            advance(slab.nbytes)
    return FinishedFile(file=hash_file(path), places=tuple(places))


def _append_tensor(stream: IO[bytes], path: Path, tensor: Tensor) -> tuple[int, int]:
    """Append a contiguous tensor in the format of `torch.save`, without the unused checksum; return its byte range."""
    # With an aligned archive, the tensor in it is aligned and can be mapped.
    stream.write(bytes(-stream.tell() % ALIGNMENT))
    begin = stream.tell()
    with torch.serialization.skip_data():
        torch.save(tensor, stream)
    end = stream.tell()
    stream.flush()
    stream.seek(load_torch_archive(path, begin, end).begin)
    stream.write(tensor_bytes(tensor))
    stream.seek(end)
    return begin, end


def _write_empty_object(path: Path) -> _StorageInfo:
    with open_durable_file(path) as stream:
        torch.save([None], stream)
        return _StorageInfo(path.name, 0, stream.tell())


@dataclass(frozen=True)
class _LayerStack:
    """Position of a tensor's layer in a stack of equal layers; no layer for tensors outside stacks."""

    layer: int | None
    layers: int
    taps: bool
    name: str

    @classmethod
    def from_part(cls, part: MegatronTensorMapping, model: ModelConfig) -> _LayerStack:
        head, _ = split_megatron_layer_prefix(part.name)
        alike = len(set(model.layer_kinds[: model.num_layers])) == 1 and not is_hybrid_model(model)
        stack = next((stack for stack in STACKS if head.startswith(stack)), "") if alike else ""
        layer = int(head.split(".")[2]) if stack else None
        return cls(layer, count_encoder_or_decoder_layers(model, stack), part.taps, stack)

    def tensor_keys(self, part: MegatronTensorMapping, *, latent: bool) -> list[str]:
        """Return the names of a tensor: all of them if its name depends on the kind of layer."""
        head, tail = split_megatron_layer_prefix(part.name)
        tails = dict.fromkeys([tail, part.te or tail, *([part.local or tail] if latent else [])])
        names = [(self.name or head) + name for name in tails]
        return [*names, part.also] if part.also else names

    def stacked_shape(self, shape: TensorShape) -> TensorShape:
        return self._add_axes(self.layers, 1, shape)

    def chunk_shape(self, shape: TensorShape) -> TensorShape:
        return self._add_axes(1, 1, shape)

    def chunk_offset(self, offset: TensorShape) -> TensorShape:
        return self._add_axes(self.layer or 0, 0, offset)

    def _add_axes(self, layer: int, middle: int, numbers: TensorShape) -> TensorShape:
        """Return sizes or offsets with Megatron's additional axes."""
        if self.taps:
            numbers = (numbers[0], middle, *numbers[1:])
        return numbers if self.layer is None else (layer, *numbers)

    def extra_state_keys(self, key: str, part: MegatronTensorMapping) -> Iterator[str]:
        """Yield the keys of Transformer Engine's extra state of a module, one per expert."""
        module, _, rest = key.partition(".weight")
        norm = key.endswith(("norm.weight", ".softmax_offset")) and not key.endswith(".mixer.norm.weight")
        if not is_projection_weight(f"{module}.weight") and not norm:
            return
        experts = part.shape[0] if EXPERTS in key else 0
        for expert in range(experts) if experts else (None,):
            axes = [(self.layer, self.layers)] * (self.layer is not None) + [(expert, experts)] * (expert is not None)
            offset, shape = (".".join(map(str, numbers)) for numbers in zip(*(axes or [(0, 1)]), strict=True))
            yield f"{module if rest else key.rpartition('.')[0]}._extra_state/shard_{offset}_{shape}"


def _build_metadata(
    writing: MegatronWriteInput,
    chunks: Mapping[str, Sequence[tuple[UnwrittenTensorChunk, _StorageInfo]]],
    empty: _StorageInfo,
) -> Metadata:
    """Return the DCP metadata: each tensor with its chunks, and the empty object for each extra state."""
    metadata = Metadata({}, storage_data={})
    for part in writing.parts:
        stack = _LayerStack.from_part(part, writing.model)
        for key in stack.tensor_keys(part, latent=writing.model.mla is not None):
            kind, shape = writing.get_stored_dtype(part), torch.Size(stack.stacked_shape(part.shape))
            new_entry = TensorStorageMetadata(TensorProperties(dtype=kind), shape, [])
            entry = metadata.state_dict_metadata.setdefault(key, new_entry)
            assert isinstance(entry, TensorStorageMetadata)
            for slab, info in chunks[part.name]:
                offset = torch.Size(stack.chunk_offset(slab.offset))
                entry.chunks.append(ChunkStorageMetadata(offset, torch.Size(stack.chunk_shape(slab.shape))))
                metadata.storage_data[MetadataIndex(key, offset)] = info
            for state in stack.extra_state_keys(key, part):
                metadata.state_dict_metadata[state] = BytesStorageMetadata()
                metadata.storage_data[MetadataIndex(state)] = empty
    model = writing.model
    # Megatron loads these models, unlike GPT, strictly: these states must exist.
    if is_hybrid_model(model) or model.encoder or not model.causal:
        for name in HEAD_STATES if model.encoder else HEAD_STATES[:1]:
            state = f"{name}/shard_0_1"
            metadata.state_dict_metadata[state] = BytesStorageMetadata()
            metadata.storage_data[MetadataIndex(state)] = empty
    return metadata
