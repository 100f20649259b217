"""Single-process checkpoint writer that streams tensors one slab at a time, for conversion.

The files are those of `store.save_sharded_checkpoint`, which saves the tensors of all ranks instead.
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
from mega_ckpt.manifest import (
    DTYPE_NAMES,
    ManifestFileEntry,
    ManifestTensorEntry,
    TensorChunk,
    make_checkpoint_manifest,
)
from mega_ckpt.resumable_folder import RunOnce, WriteJournal, write_without_journal
from mega_ckpt.shard_files import HashingFileWriter, UnwrittenTensorChunk, write_shards
from mega_ckpt.tensor_pieces import TensorShape, crop_tensor, split_slice_by_elements
from mega_ckpt.weight_source import ConvertedTrainingState, WeightSource, choose_cast_dtype
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location
from mega_common.progress_logging import ProgressBar

BLOCK_BYTES = 64 << 20
FILE_BYTES = 4 << 30


def split_into_contiguous_slices(shape: TensorShape, dtype: torch.dtype) -> Iterator[tuple[TensorShape, TensorShape]]:
    """Split a tensor of `shape` into contiguous slices (offset, shape) of at most `BLOCK_BYTES`, in row-major order."""
    return split_slice_by_elements(shape, BLOCK_BYTES // dtype.itemsize)


def split_tensor_for_checkpoint(key: str, dtype: torch.dtype, shape: TensorShape) -> list[UnwrittenTensorChunk]:
    """Return the slices of at most `BLOCK_BYTES` that a checkpoint stores the tensor `key` as."""
    return [
        UnwrittenTensorChunk(key, dtype, shape, offset, extent)
        for offset, extent in split_into_contiguous_slices(shape, dtype)
    ]


def write_checkpoint(
    folder: Location,
    slabs: Sequence[UnwrittenTensorChunk],
    resolve: Callable[[UnwrittenTensorChunk], Tensor],
    *,
    model: ModelConfig,
    step: int = 0,
    state: Mapping[str, Any] | None = None,
    assets: Mapping[str, Path | bytes] | None = None,
    provenance: Mapping[str, Any] | None = None,
    once: RunOnce = write_without_journal,
) -> None:
    """Write the files of a mega checkpoint into an existing folder, in one process.
    The function `resolve` returns the content of each tensor slice in `slabs`. The files are durable when this returns.

    Args:
        folder: folder that the caller renames to become the checkpoint; on an object store, the checkpoint is its parent.
        slabs: slabs to write, which must tile their tensors.
        resolve: returns a slab's elements, in its shape and dtype; called for one slab at a time.
        model: configuration of the model.
        step: number of optimizer steps.
        state: trainer state; empty after a conversion.
        assets: files for `assets/`, {path in the folder: file or its content}.
        provenance: origin of the checkpoint, as free-form JSON.
        once: skips shards that are already complete; other files are always written.
    """
    manifest = make_checkpoint_manifest(step, model, state or {}, provenance)
    files = {
        f"assets/{name}": _write_asset(folder / "assets" / name, content) for name, content in (assets or {}).items()
    }
    chunks: defaultdict[str, list[TensorChunk]] = defaultdict(list)
    by_key = {slab.key: slab for slab in slabs}
    for contents, entry in write_shards(folder, "shard", slabs, resolve, FILE_BYTES, once):
        files[contents[0][1].file] = entry
        for slab, chunk in contents:
            chunks[slab.key].append(chunk)
    tensors = {
        key: ManifestTensorEntry(
            dtype=DTYPE_NAMES[by_key[key].dtype], shape=by_key[key].global_shape, chunks=tuple(tensor_chunks)
        )
        for key, tensor_chunks in chunks.items()
    }
    manifest = manifest.model_copy(update={"files": dict(sorted(files.items())), "tensors": tensors})
    put_manifest(folder, manifest)


def write_weights_as_checkpoint(
    source: WeightSource,
    folder: Location,
    title: str,
    *,
    read: Callable[[str, TensorShape, TensorShape], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    training: ConvertedTrainingState | None = None,
    step: int = 0,
    provenance: Mapping[str, Any] | None = None,
    journal: WriteJournal | None = None,
) -> None:
    """Write the tensors of `source` as a mega checkpoint into an existing folder, in one process.
    A progress bar is labelled `title`. The files are durable when this returns.

    Args:
        source: the model with its weights, buffers and assets.
        folder: see `write_checkpoint`, also for `step` and `provenance`.
        title: title of the progress bar.
        read: replaces `source.read_tensor_slice`; may return any dtype.
        dtype: dtype to cast floating-point weights to; None: unchanged.
        training: optimizer and trainer state to resume from; its step replaces `step`, its tensors become fp32.
        journal: journal of finished files.
    """
    slabs = _split_model_tensors(source, dtype)
    state = {f"{OPTIMIZER}{kind}/": tensors for kind, tensors in training.tensors.items()} if training else {}
    for prefix, tensors in state.items():
        slabs += [
            slab
            for name in tensors.tensor_names()
            for slab in split_tensor_for_checkpoint(prefix + name, torch.float32, tensors.tensor_shape(name))
        ]
    readers = {WEIGHTS: read or source.read_tensor_slice} | {
        prefix: tensors.read_tensor_slice for prefix, tensors in state.items()
    }
    with ProgressBar(title, total=sum(slab.nbytes for slab in slabs), unit="bytes") as bar:

        def resolve_slab(slab: UnwrittenTensorChunk) -> Tensor:
            bar.advance(slab.nbytes)
            if slab.key.startswith(BUFFERS):
                return crop_tensor(source.read_buffer(slab.key.removeprefix(BUFFERS)), slab.offset, slab.shape)
            group, name = slab.key.rsplit("/", 1)
            return readers[f"{group}/"](name, slab.offset, slab.shape).to(slab.dtype)

        if journal:
            journal.advance = bar.advance
        once = journal.write_once if journal else write_without_journal
        write_checkpoint(
            folder, slabs, resolve_slab,
            model=source.model, step=training.step if training else step, state=training.state if training else None,
            assets=source.asset_files(), provenance=provenance, once=once,
        )  # fmt: skip


def _split_model_tensors(source: WeightSource, dtype: torch.dtype | None) -> list[UnwrittenTensorChunk]:
    """The chunks of a model's weights, cast to `dtype` where they are floating point, and of its buffers."""
    slabs = [
        slab
        for name in source.tensor_names()
        for slab in split_tensor_for_checkpoint(
            WEIGHTS + name, choose_cast_dtype(source, name, dtype), source.tensor_shape(name)
        )
    ]
    for name in source.buffer_names():
        buffer = source.read_buffer(name)
        slabs += split_tensor_for_checkpoint(BUFFERS + name, buffer.dtype, tuple(buffer.shape))
    return slabs


def _write_asset(path: Location, content: Path | bytes) -> ManifestFileEntry:
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with HashingFileWriter(path) as file:
        file.write_hashed(content.read_bytes() if isinstance(content, Path) else content)
        return file.close()
