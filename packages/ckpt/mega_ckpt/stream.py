"""Write a checkpoint in one process while its tensors come in, a slab at a time: what conversion does.

The files are those of `store.save`, which instead starts from tensors that ranks hold.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.manifest import DTYPE_NAMES, MANIFEST, Chunk, FileEntry, TensorEntry, make_manifest
from mega_ckpt.pieces import Shape
from mega_ckpt.shards import NewFile, Slab, write_shards
from mega_common.model_config import ModelConfig

SLAB_BYTES = 64 << 20
FILE_BYTES = 4 << 30


def row_blocks(shape: Shape, itemsize: int, max_bytes: int = SLAB_BYTES) -> Iterator[tuple[Shape, Shape]]:
    """Cut a tensor into blocks of whole rows of about `max_bytes`: (offset, shape) of each, in order."""
    if not shape:
        yield (), ()
        return
    rows = max(1, max_bytes // max(1, math.prod(shape[1:]) * itemsize))
    for first in range(0, max(shape[0], 1), rows):
        yield (first, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - first), *shape[1:])


def slabs_of(key: str, dtype: torch.dtype, shape: Shape) -> list[Slab]:
    """The slabs that a tensor is written as."""
    return [Slab(key, dtype, shape, offset, extent) for offset, extent in row_blocks(shape, dtype.itemsize)]


def write_checkpoint(
    folder: Path,
    slabs: Sequence[Slab],
    resolve: Callable[[Slab], Tensor],
    *,
    model: ModelConfig,
    step: int = 0,
    state: Mapping[str, Any] | None = None,
    assets: Mapping[str, Path | bytes] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write the files of a checkpoint into an existing empty folder; durable when this returns.

    Args:
        folder: to become the checkpoint once the caller renames it.
        slabs: what to write; those of one tensor tile it.
        resolve: gives a slab's elements, in its shape and dtype. Asked for one at a time.
        model: what the weights are of.
        step: optimizer steps done.
        state: what a trainer would resume from; nothing after a conversion.
        assets: files to put in `assets/`, {path in there: file or its content}.
        provenance: where this came from, as free JSON.
    """
    manifest = make_manifest(step, model, state or {}, provenance)
    files = {
        f"assets/{name}": _write_asset(folder / "assets" / name, content) for name, content in (assets or {}).items()
    }
    chunks: defaultdict[str, list[Chunk]] = defaultdict(list)
    whole = {slab.key: slab for slab in slabs}
    for held, entry in write_shards(folder, "shard", slabs, resolve, FILE_BYTES):
        files[held[0][1].file] = entry
        for slab, chunk in held:
            chunks[slab.key].append(chunk)
    tensors = {
        key: TensorEntry(dtype=DTYPE_NAMES[whole[key].dtype], shape=whole[key].global_shape, chunks=tuple(held))
        for key, held in chunks.items()
    }
    manifest = manifest.model_copy(update={"files": dict(sorted(files.items())), "tensors": tensors})
    with NewFile(folder / MANIFEST) as file:
        file.write(manifest.encode())
        file.close()


def _write_asset(path: Path, content: Path | bytes) -> FileEntry:
    path.parent.mkdir(parents=True, exist_ok=True)
    with NewFile(path) as file:
        file.write(content.read_bytes() if isinstance(content, Path) else content)
        return file.close()
