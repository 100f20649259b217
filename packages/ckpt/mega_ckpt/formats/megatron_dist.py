"""Megatron's `torch_dist` folders: torch.distributed.checkpoint (`dcp`), with a name and a global shape for every tensor.

    iter_0000100/
        .metadata, __0_0.distcp ...
        common.pt            pickle: args, iteration, version; newer ones have it as the object `common_state`
        metadata.json        the format's name and version

Layers that are alike are one tensor, [L, ...]; what differs has the number of its layer in the name.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.formats import dcp
from mega_ckpt.formats.dcp import Entries, Saved, Stored
from mega_ckpt.formats.megatron_contents import Contents, Held, OptimizerHeld
from mega_ckpt.formats.megatron_names import STACKS, split_layer, told_by, usual_name
from mega_ckpt.formats.megatron_singleton import join_singletons
from mega_ckpt.formats.torch_archive import load_archive, namespace
from mega_ckpt.pieces import Shape, rectangles
from mega_common.errors import CheckpointError

COMMON, FORMAT = "common.pt", "metadata.json"
MAX_LAYERS = 100_000
COMMON_OBJECT = "common_state/shard_0_1"
# A tensor of the optimizer in the shape of its weight; older names have the number of the optimizer before them.
_OF_WEIGHT = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
# One that follows the buckets of the ranks that wrote it, and what is said beside.
_OF_LAYOUT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(\w+)")
_SAID = ("optimizer", "grad_scaler")
_BUCKETS = (
    "the distributed optimizer's buckets fit only the ranks that wrote them "
    "(Megatron saves it otherwise with --dist-ckpt-optim-fully-reshardable)"
)
# Beside the model: optimizer, random numbers, data loader.
_OTHERS = ("optimizer", "chained_", "rng_state", "rerun_state", "opt_param_scheduler", "run_config", "iteration")
_WRAPPER = re.compile(r"^((?:chained_\d+\.)?(?:optimizer\.state\.\w+\.)?)module\.")
_TAPS = re.compile(r"mixer\.conv1d\.weight\.\w+")  # [channels, 1, k] there


def read(folder: Path) -> Contents:
    """Look at a folder without reading its tensors.

    Raises:
        CheckpointError: when it is damaged, or asks for what no checkpoint needs.
    """
    saved = dcp.read(folder)
    held: dict[str, Held] = {}
    with dcp.damage(folder):
        tensors = join_singletons({_unwrapped(key): one for key, one in saved.tensors.items()})
        for key, one in tensors.items():
            if not key.startswith(_OTHERS) and not key.endswith("._extra_state"):
                _add(held, key, one.shape, one.dtype, one.chunks)
        kinds = _kinds(tensors)
    common = _common(folder, saved.entries)
    schedule = common.get("opt_param_scheduler")
    by_rank = {name[1] for key in saved.keys if (name := _OF_LAYOUT.match(key))}.difference(_SAID)
    return Contents(
        "torch_dist",
        namespace(common.get("args")) | told_by(held),
        _whole(common, "iteration"),
        len(held),
        lambda _: held,
        _whole(schedule, "num_steps"),
        OptimizerHeld(kinds, lambda: _said(common, saved.entries), _BUCKETS if by_rank else ""),
    )


def _unwrapped(key: str) -> str:
    """The name without what NeMo wraps a model in, also as part of the name of its optimizer's state."""
    return _WRAPPER.sub(r"\1", key, count=1)


def _whole(said: Any, name: str) -> int | None:
    """A whole number of what is said, if it is one."""
    value = said.get(name) if isinstance(said, Mapping) else None
    return value if isinstance(value, int) else None


def _kinds(tensors: Mapping[str, Saved]) -> dict[str, dict[str, Held]]:
    """The optimizer's tensors by kind."""
    out: dict[str, dict[str, Held]] = defaultdict(dict)
    for key, one in tensors.items():
        found = _OF_WEIGHT.fullmatch(key)
        if not found or found[2] not in tensors:
            continue
        chunks, shape, weight = one.chunks, one.shape, tensors[found[2]].shape
        if len(shape) == len(weight) + 1:
            chunks = [part for chunk in chunks for part in _unflattened(chunk, shape[:-1], weight)]
            shape = weight
        _add(out[found[1]], found[2], shape, one.dtype, chunks)
    return out


def _unflattened(chunk: Stored, grid: Shape, shape: Shape) -> Iterator[Stored]:
    """The rectangles of a stretch of one cell, where a tensor is a grid of cells, each in a row: [*grid, elements].

    `fully_sharded_model_space` of older versions is that; a cell is what one rank of the model has.
    """
    *cell, start = chunk.offset
    size = tuple(n // parts for n, parts in zip(shape, grid, strict=True))

    def reader(first: int, extent: Shape) -> Callable[[], Tensor]:
        return lambda: chunk.read().reshape(-1)[first : first + math.prod(extent)].view(extent)

    for low, extent, first in rectangles(size, start, start + chunk.shape[-1]):
        place = tuple(at * n + o for at, n, o in zip(cell, size, low, strict=True))
        yield Stored(place, extent, reader(first - start, extent))


def _said(common: Mapping[str, Any], entries: Entries) -> list[Any]:
    """What the optimizer has beside tensors: among the common state, or in objects of its own."""
    found = [(_OF_LAYOUT.match(key), entry) for (key, offset), entry in entries.items() if offset is None]
    return [common.get("optimizer"), *(entry.value for name, entry in found if name and name[1] in _SAID)]


def _common(folder: Path, entries: Entries) -> Mapping[str, Any]:
    """What is not tensors: from a file, or from an object, or nothing."""
    if (folder / COMMON).exists():
        value = load_archive(folder / COMMON)
    else:
        entry = entries.get((COMMON_OBJECT, None))
        value = entry.value if entry else {}
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return value if isinstance(value, dict) else {}


def _add(held: dict[str, Held], key: str, shape: Shape, dtype: torch.dtype, chunks: Sequence[Stored]) -> None:
    """Add the layers of a tensor under the names that they have by themselves."""
    head, tail = split_layer(key)
    if _TAPS.fullmatch(tail) and len(shape) == 3:
        chunks, shape = [_without_middle(chunk) for chunk in chunks], (shape[0], shape[2])
    stacked = head in STACKS
    if stacked and shape[0] > MAX_LAYERS:
        raise CheckpointError(f"{key}: {shape[0]} layers, which no model has")
    if stacked and shape[0] > len(chunks) * max((chunk.shape[0] for chunk in chunks), default=0):
        raise CheckpointError(f"the shards of {key} leave a part out of its {shape[0]} layers")
    for layer in range(shape[0]) if stacked else (None,):
        name = usual_name(key if layer is None else f"{head}{layer}.{tail}")
        held[name] = Held(dtype, shape if layer is None else shape[1:])
    for chunk in chunks:
        if not stacked:
            held[usual_name(key)].stored.append(chunk)
            continue
        for row in range(chunk.shape[0]):
            name = usual_name(f"{head}{chunk.offset[0] + row}.{tail}")
            held[name].stored.append(Stored(chunk.offset[1:], chunk.shape[1:], _row(chunk, row)))


def _without_middle(chunk: Stored) -> Stored:
    (first, _, last), (rows, _, taps) = chunk.offset, chunk.shape
    return Stored((first, last), (rows, taps), lambda: chunk.read().squeeze(1))


def _row(chunk: Stored, row: int) -> Callable[[], Tensor]:
    return lambda: chunk.read()[row]
