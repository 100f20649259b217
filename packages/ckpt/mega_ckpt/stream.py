"""Write a checkpoint in one process while its tensors come in, a slab at a time: what conversion does.

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
from mega_ckpt.commits import put_manifest
from mega_ckpt.journal import Journal, Once, always
from mega_ckpt.manifest import DTYPE_NAMES, Chunk, FileEntry, TensorEntry, make_manifest
from mega_ckpt.pieces import Shape, crop, cut
from mega_ckpt.shards import NewFile, Slab, write_shards
from mega_ckpt.source import Source, cast_dtype
from mega_ckpt.training import Training
from mega_common.log import ProgressBar
from mega_common.model_config import ModelConfig
from mega_common.remote import Place

BLOCK_BYTES = 64 << 20
FILE_BYTES = 4 << 30


def blocks(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[Shape, Shape]]:
    """Cut a tensor into contiguous boxes (offset, shape) of at most `BLOCK_BYTES`, in row-major order."""
    return cut(shape, BLOCK_BYTES // dtype.itemsize)


def slabs_of(key: str, dtype: torch.dtype, shape: Shape) -> list[Slab]:
    """The slabs that a tensor is written as."""
    return [Slab(key, dtype, shape, offset, extent) for offset, extent in blocks(shape, dtype)]


def write_checkpoint(
    folder: Place,
    slabs: Sequence[Slab],
    resolve: Callable[[Slab], Tensor],
    *,
    model: ModelConfig,
    step: int = 0,
    state: Mapping[str, Any] | None = None,
    assets: Mapping[str, Path | bytes] | None = None,
    provenance: Mapping[str, Any] | None = None,
    once: Once = always,
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
    chunks: defaultdict[str, list[Chunk]] = defaultdict(list)
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
    source: Source,
    folder: Place,
    title: str,
    *,
    read: Callable[[str, Shape, Shape], Tensor] | None = None,
    dtype: torch.dtype | None = None,
    training: Training | None = None,
    step: int = 0,
    provenance: Mapping[str, Any] | None = None,
    journal: Journal | None = None,
) -> None:
    """Write a checkpoint of what `source` holds, as `write_checkpoint` does, under a progress bar with a title.

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
        for name in source.keys()  # noqa: SIM118
        for slab in slabs_of(WEIGHTS + name, cast_dtype(source, name, dtype), source.shape(name))
    ]
    for name in source.buffers():
        buffer = source.read_buffer(name)
        slabs += slabs_of(BUFFERS + name, buffer.dtype, tuple(buffer.shape))
    state = {f"{OPTIMIZER}{kind}/": held for kind, held in training.tensors.items()} if training else {}
    for prefix, held in state.items():
        slabs += [slab for name in held.keys() for slab in slabs_of(prefix + name, torch.float32, held.shape(name))]  # noqa: SIM118
    elements = {WEIGHTS: read or source.read_slice} | {prefix: held.read_slice for prefix, held in state.items()}
    with ProgressBar(title, total=sum(slab.nbytes for slab in slabs), unit="bytes") as bar:

        def resolve(slab: Slab) -> Tensor:
            bar.advance(slab.nbytes)
            if slab.key.startswith(BUFFERS):
                return crop(source.read_buffer(slab.key.removeprefix(BUFFERS)), slab.offset, slab.shape)
            group, name = slab.key.rsplit("/", 1)
            return elements[f"{group}/"](name, slab.offset, slab.shape).to(slab.dtype)

        if journal:
            journal.advance = bar.advance
        once = journal.once if journal else always
        write_checkpoint(
            folder, slabs, resolve,
            model=source.model, step=training.step if training else step, state=training.state if training else None,
            assets=source.assets(), provenance=provenance, once=once,
        )  # fmt: skip


def _write_asset(path: Place, content: Path | bytes) -> FileEntry:
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with NewFile(path) as file:
        file.write(content.read_bytes() if isinstance(content, Path) else content)
        return file.close()
