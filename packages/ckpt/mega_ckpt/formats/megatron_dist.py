"""Megatron's `torch_dist` folders: torch.distributed.checkpoint, with a name and a global shape for every tensor.

    iter_0000100/
        .metadata            pickle: {name: shape, dtype, chunks}, {(name, offset): file, first byte, bytes}
        __0_0.distcp ...     one `torch.save` archive after another
        common.pt            pickle: args, iteration, version; newer ones have it as the object `common_state`
        metadata.json        the format's name and version

Layers that are alike are one tensor, [L, ...]; what differs has the number of its layer in the name.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.formats.megatron_contents import Contents, Held, OptimizerHeld, Stored
from mega_ckpt.formats.megatron_names import LAYER, split_layer, usual_name
from mega_ckpt.formats.pickles import MAX_PICKLE_BYTES, load_pickle
from mega_ckpt.formats.torch_archive import StoredTensor, load_archive, namespace
from mega_ckpt.manifest import MAX_AXES
from mega_ckpt.pieces import Shape, rectangles
from mega_common.errors import CheckpointError

METADATA, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
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


_TAPS = re.compile(r"mixer\.conv1d\.weight\.\w+")  # [channels, 1, k] there


@dataclass(frozen=True)
class _Entry:
    """Bytes [begin, end) of a file, which are an archive that holds one tensor, or an object."""

    path: Path
    begin: int
    end: int

    @cached_property
    def value(self) -> Any:
        """What is in it; tensors are not read."""
        return load_archive(self.path, self.begin, self.end)


@dataclass(frozen=True)
class _Chunk:
    entry: _Entry
    dtype: torch.dtype
    shape: Shape

    def read(self) -> Tensor:
        """The chunk, mapped.

        Raises:
            CheckpointError: when the file holds another tensor than the metadata says.
        """
        value = self.entry.value
        if not isinstance(value, StoredTensor) or (value.dtype, value.shape) != (self.dtype, self.shape):
            raise CheckpointError(
                f"{self.entry.path}: at byte {self.entry.begin} is not the tensor that {METADATA} says"
            )
        return value.read()


def read(folder: Path) -> Contents:
    """Look at a folder without reading its tensors.

    Raises:
        CheckpointError: when it is damaged, or asks for what no checkpoint needs.
    """
    path = folder / METADATA
    if path.stat().st_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path}: larger than {MAX_PICKLE_BYTES} bytes, which no metadata is")
    metadata = load_pickle(path.read_bytes(), str(path))
    try:
        entries = {_place(index): _entry(folder, info) for index, info in metadata.storage_data.items()}
        tensors = {key: one for key, one in metadata.state_dict_metadata.items() if _is_tensor(one)}
        held: dict[str, Held] = {}
        for key, one in tensors.items():
            if not key.startswith(_OTHERS) and not key.endswith("._extra_state"):
                _add(held, key, _sizes(one.size), _dtype(one), _chunks(key, one, entries))
        kinds = _kinds(tensors, entries)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, ArithmeticError) as error:
        raise CheckpointError(f"{path}: not the metadata of a torch_dist checkpoint ({error!r})") from None
    common = _common(folder, entries)
    schedule = common.get("opt_param_scheduler")
    by_rank = {name[1] for key in metadata.state_dict_metadata if (name := _OF_LAYOUT.match(key))}.difference(_SAID)
    return Contents(
        "torch_dist",
        namespace(common.get("args")),
        _whole(common, "iteration"),
        len(held),
        lambda _: held,
        _whole(schedule, "num_steps"),
        OptimizerHeld(kinds, lambda: _said(common, entries), _BUCKETS if by_rank else ""),
    )


def _whole(said: Any, name: str) -> int | None:
    """A whole number of what is said, if it is one."""
    value = said.get(name) if isinstance(said, Mapping) else None
    return value if isinstance(value, int) else None


def _kinds(
    tensors: Mapping[str, Any], entries: Mapping[tuple[str, Shape | None], _Entry]
) -> dict[str, dict[str, Held]]:
    """The optimizer's tensors by kind."""
    out: dict[str, dict[str, Held]] = defaultdict(dict)
    for key, one in tensors.items():
        found = _OF_WEIGHT.fullmatch(key)
        if not found or found[2] not in tensors:
            continue
        chunks, shape, weight = _chunks(key, one, entries), _sizes(one.size), _sizes(tensors[found[2]].size)
        if len(shape) == len(weight) + 1:
            chunks = [part for chunk in chunks for part in _unflattened(chunk, shape[:-1], weight)]
            shape = weight
        _add(out[found[1]], found[2], shape, _dtype(one), chunks)
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


def _said(common: Mapping[str, Any], entries: Mapping[tuple[str, Shape | None], _Entry]) -> list[Any]:
    """What the optimizer has beside tensors: among the common state, or in objects of its own."""
    found = [(_OF_LAYOUT.match(key), entry) for (key, offset), entry in entries.items() if offset is None]
    return [common.get("optimizer"), *(entry.value for name, entry in found if name and name[1] in _SAID)]


def _common(folder: Path, entries: Mapping[tuple[str, Shape | None], _Entry]) -> Mapping[str, Any]:
    """What is not tensors: from a file, or from an object, or nothing."""
    if (folder / COMMON).exists():
        value = load_archive(folder / COMMON)
    else:
        entry = entries.get((COMMON_OBJECT, None))
        value = entry.value if entry else {}
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return value if isinstance(value, dict) else {}


def _place(index: Any) -> tuple[str, Shape | None]:
    offset = index.state.get("offset")  # absent for objects
    return str(index.fqn), None if offset is None else _sizes(offset)


def _entry(folder: Path, info: Any) -> _Entry:
    name, begin, length = info.relative_path, info.offset, info.length
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+\.distcp", name):
        raise CheckpointError(f"{folder / METADATA}: {name!r} is not the plain name of a file in the same folder")
    if info.state.get("transform_descriptors"):
        raise CheckpointError(f"{folder / METADATA}: {name} is compressed", hint="save it again without compression")
    (begin, length) = _sizes((begin, length))
    return _Entry(folder / name, begin, begin + length)


def _is_tensor(one: Any) -> bool:
    return str(one.name).endswith(".TensorStorageMetadata")


def _sizes(numbers: Any) -> Shape:
    out = tuple(numbers)
    if len(out) > MAX_AXES or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in out):
        raise ValueError(f"{out!r:.80} are not sizes")
    return out


def _dtype(one: Any) -> torch.dtype:
    kind = one.properties.state
    found = getattr(torch, (kind[0] if isinstance(kind, tuple) else kind["dtype"]).name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def _chunks(key: str, one: Any, entries: Mapping[tuple[str, Shape | None], _Entry]) -> list[Stored]:
    out = []
    for chunk in one.chunks:
        offset, shape = _sizes(chunk.offsets), _sizes(chunk.sizes)
        out.append(Stored(offset, shape, _Chunk(entries[key, offset], _dtype(one), shape).read))
    return out


def _add(held: dict[str, Held], key: str, shape: Shape, dtype: torch.dtype, chunks: Sequence[Stored]) -> None:
    """Add the layers of a tensor under the names that they have by themselves."""
    head, tail = split_layer(key)
    if _TAPS.fullmatch(tail) and len(shape) == 3:
        chunks, shape = [_without_middle(chunk) for chunk in chunks], (shape[0], shape[2])
    stacked = head == LAYER
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
