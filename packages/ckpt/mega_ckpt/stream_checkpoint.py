"""Single-process checkpoint writer that streams tensors one slab at a time, for conversion.

The files are those of `store.save`, which instead starts from tensors that ranks hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.checkpoint import BUFFERS, OPTIMIZER, WEIGHTS
from mega_ckpt.checkpoint_folders import put_manifest
from mega_ckpt.manifest import DTYPE_NAMES, FileEntry, TensorChunk, TensorEntry, make_manifest
from mega_ckpt.resumable_folder import RunOnce, WriteJournal, write_always
from mega_ckpt.shard_files import HashedFile, ShardSlab, write_shards
from mega_ckpt.source import WeightSource, cast_dtype
from mega_ckpt.tensor_pieces import TensorShape, crop_tensor, split_box
from mega_ckpt.training_state import ConvertedTraining
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location
from mega_common.progress_logging import ProgressBar

BLOCK_BYTES = 64 << 20
FILE_BYTES = 4 << 30


def split_blocks(shape: TensorShape, dtype: torch.dtype) -> Iterator[tuple[TensorShape, TensorShape]]:
    """Split a tensor into contiguous boxes (offset, shape) of at most `BLOCK_BYTES`, in row-major order."""
    return split_box(shape, BLOCK_BYTES // dtype.itemsize)


def slabs_of_tensor(key: str, dtype: torch.dtype, shape: TensorShape) -> list[ShardSlab]:
    """Return the slabs that a tensor is written as."""
    return [ShardSlab(key, dtype, shape, offset, extent) for offset, extent in split_blocks(shape, dtype)]


def write_checkpoint(
    folder: Location,
    slabs: Sequence[ShardSlab],
    resolve: Callable[[ShardSlab], Tensor],
    *,
    model: ModelConfig,
    step: int = 0,
    state: Mapping[str, Any] | None = None,
    assets: Mapping[str, Path | bytes] | None = None,
    provenance: Mapping[str, Any] | None = None,
    once: RunOnce = write_always,
) -> None:
    """Write the files of a checkpoint into an existing folder; durable when this returns.

    Args:
        folder: to become the checkpoint once the caller renames it; on an object store, its parent has become it then.
        slabs: what to write; those of one tensor tile it.
        resolve: gives a slab's elements, in its shape and dtype. Asked for one at a time.
        model: what the weights are of.
        step: optimizer steps done.
        state: what a trainer would resume from; nothing after a conversion.
        assets: files to put in `assets/`, {path in there: file or its content}.
        provenance: where this came from, as free JSON.
        once: passes over shards that are there already; nothing else is.
    """
    manifest = make_manifest(step, model, state or {}, provenance)
    files = {
        f"assets/{name}": _write_asset(folder / "assets" / name, content) for name, content in (assets or {}).items()
    }
    chunks: defaultdict[str, list[TensorChunk]] = defaultdict(list)
    whole = {slab.key: slab for slab in slabs}
    for held, entry in write_shards(folder, "shard", slabs, resolve, FILE_BYTES, once):
        files[held[0][1].file] = entry
        for slab, chunk in held:
            chunks[slab.key].append(chunk)
    tensors = {
        key: TensorEntry(dtype=DTYPE_NAMES[whole[key].dtype], shape=whole[key].global_shape, chunks=tuple(held))
        for key, held in chunks.items()
    }
    manifest = manifest.model_copy(update={"files": dict(sorted(files.items())), "tensors": tensors})
    put_manifest(folder, manifest)


def write_weights(
    source: WeightSource,
    folder: Location,
    title: str,
    *,
    read: Callable[[str, TensorShape, TensorShape], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    training: ConvertedTraining | None = None,
    step: int = 0,
    provenance: Mapping[str, Any] | None = None,
    journal: WriteJournal | None = None,
) -> None:
    """Write a checkpoint of the tensors of `source`, like `write_checkpoint`, with a progress bar.

    Args:
        source: the model, its weights, buffers and assets.
        folder: see there, as for `step` and `provenance`.
        title: what the progress bar says.
        read: gives the weights in place of `source.read_slice`, in any dtype.
        dtype: to cast floating-point weights to.
        training: what a run goes on from, with a step of its own; its tensors become fp32.
        journal: knows what is finished already.
    """
    slabs = [
        slab
        for name in source.tensor_names()
        for slab in slabs_of_tensor(WEIGHTS + name, cast_dtype(source, name, dtype), source.tensor_shape(name))
    ]
    for name in source.buffer_names():
        buffer = source.read_buffer(name)
        slabs += slabs_of_tensor(BUFFERS + name, buffer.dtype, tuple(buffer.shape))
    state = {f"{OPTIMIZER}{kind}/": held for kind, held in training.tensors.items()} if training else {}
    for prefix, held in state.items():
        slabs += [
            slab
            for name in held.tensor_names()
            for slab in slabs_of_tensor(prefix + name, torch.float32, held.tensor_shape(name))
        ]
    elements = {WEIGHTS: read or source.read_tensor_slice} | {
        prefix: held.read_tensor_slice for prefix, held in state.items()
    }
    with ProgressBar(title, total=sum(slab.nbytes for slab in slabs), unit="bytes") as bar:

        def resolve_slab(slab: ShardSlab) -> Tensor:
            bar.advance(slab.nbytes)
            if slab.key.startswith(BUFFERS):
                return crop_tensor(source.read_buffer(slab.key.removeprefix(BUFFERS)), slab.offset, slab.shape)
            group, name = slab.key.rsplit("/", 1)
            return elements[f"{group}/"](name, slab.offset, slab.shape).to(slab.dtype)

        if journal:
            journal.advance = bar.advance
        once = journal.write_once if journal else write_always
        write_checkpoint(
            folder, slabs, resolve_slab,
            model=source.model, step=training.step if training else step, state=training.state if training else None,
            assets=source.asset_files(), provenance=provenance, once=once,
        )  # fmt: skip


def _write_asset(path: Location, content: Path | bytes) -> FileEntry:
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(path) as file:
        file.write_hashed(content.read_bytes() if isinstance(content, Path) else content)
        return file.close()
