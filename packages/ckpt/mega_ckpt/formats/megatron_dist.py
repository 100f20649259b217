"""Megatron's `torch_dist` folders: torch.distributed.checkpoint (`dcp`), with a name and a global shape for every
tensor.

    iter_0000100/
        .metadata, __0_0.distcp ...
        common.pt            pickle: args, iteration, version; newer ones have it as the object `common_state`
        metadata.json        the format's name and version

Equal layers are one tensor, [L, ...]; tensors of other layers have the layer's number in the name.

linear_fc1.weight_w, _v             the gate rows and the up rows, else one tensor [2F, D]
experts.experts.{e}.linear_fc1...   a tensor for each expert, else one tensor [E, 2F, D]
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.formats import dcp
from mega_ckpt.formats.dcp import DcpEntries, DcpSavedTensor, StoredTensorSlice
from mega_ckpt.formats.megatron_contents import MegatronContents, MegatronOptimizerState, MegatronTensor
from mega_ckpt.formats.megatron_names import (
    STACKS,
    infer_megatron_args_from_names,
    normalize_megatron_tensor_name,
    split_megatron_layer_prefix,
)
from mega_ckpt.formats.torch_archive import load_torch_archive, namespace_attributes
from mega_ckpt.tensor_pieces import TensorShape, split_flat_range
from mega_common.errors import CheckpointError

_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")
_EXPERT = re.compile(r"(.*mlp\.experts\.experts\.)(\d+)\.(linear_fc[12]\.(?:weight|bias))")


def join_local_shards(tensors: Mapping[str, DcpSavedTensor]) -> dict[str, DcpSavedTensor]:
    """Return the tensors of a Megatron `torch_dist` checkpoint with separately saved parts joined.
    The parts are halves of gated MLPs and single experts (`singleton_local_shards`). Other tensors are unchanged.

    Raises:
        CheckpointError: naming a tensor whose counterpart is missing or has another shape or dtype.
    """
    return _join_experts(_join_halves(tensors))


def _join_halves(tensors: Mapping[str, DcpSavedTensor]) -> dict[str, DcpSavedTensor]:
    out: dict[str, DcpSavedTensor] = {}
    for key, one in tensors.items():
        if (found := _HALF.fullmatch(key)) is None:
            out[key] = one
            continue
        gate, up = (tensors.get(f"{found[1]}_{half}") for half in "wv")
        if gate is None or up is None or (gate.shape, gate.dtype) != (up.shape, up.dtype):
            raise CheckpointError(f"{key}: its other half (_w, _v) is missing or has another shape or dtype")
        rows = gate.shape[0]
        moved = [replace(chunk, offset=(chunk.offset[0] + rows, *chunk.offset[1:])) for chunk in up.chunks]
        out[found[1]] = DcpSavedTensor(gate.dtype, (2 * rows, *gate.shape[1:]), [*gate.chunks, *moved])
    return out


def _join_experts(tensors: Mapping[str, DcpSavedTensor]) -> dict[str, DcpSavedTensor]:
    out: dict[str, DcpSavedTensor] = {}
    experts: defaultdict[str, dict[int, DcpSavedTensor]] = defaultdict(dict)
    for key, one in tensors.items():
        if found := _EXPERT.fullmatch(key):
            experts[found[1] + found[3]][int(found[2])] = one
        else:
            out[key] = one
    for key, held in experts.items():
        first = held[min(held)]
        if sorted(held) != list(range(len(held))) or any(
            (one.shape, one.dtype) != (first.shape, first.dtype) for one in held.values()
        ):
            raise CheckpointError(f"{key}: an expert is missing or has another shape or dtype than the others")
        chunks = [_expert_box(chunk, index) for index, one in held.items() for chunk in one.chunks]
        out[key] = DcpSavedTensor(first.dtype, (len(held), *first.shape), chunks)
    return out


def _expert_box(chunk: StoredTensorSlice, index: int) -> StoredTensorSlice:
    read: Callable[[], Tensor] = chunk.read
    return StoredTensorSlice((index, *chunk.offset), (1, *chunk.shape), lambda: read().unsqueeze(0))


COMMON, FORMAT = "common.pt", "metadata.json"
MAX_LAYERS = 100_000
COMMON_OBJECT = "common_state/shard_0_1"
# Optimizer state in the shape of its weight; older versions prefix the number of the optimizer.
_WEIGHT_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
# Optimizer state in the buckets of the ranks that saved it, and its objects.
_BUCKET_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(\w+)")
_OBJECTS = ("optimizer", "grad_scaler")
_BUCKETS = (
    "buckets of the distributed optimizer can be loaded only by the ranks that saved them "
    "(save with --dist-ckpt-optim-fully-reshardable in Megatron)"
)
# Prefixes of state other than the model's: optimizer, random numbers, data loader.
_OTHERS = ("optimizer", "chained_", "rng_state", "rerun_state", "opt_param_scheduler", "run_config", "iteration")
_WRAPPER = re.compile(r"^((?:chained_\d+\.)?(?:optimizer\.state\.\w+\.)?)module\.")
_CONV1D = re.compile(r"mixer\.conv1d\.weight\.\w+")  # stored as [channels, 1, k]


def open_megatron_dist_checkpoint(folder: Path) -> MegatronContents:
    """Open a Megatron checkpoint folder of the format `torch_dist` without reading its tensors.

    Raises:
        CheckpointError: when it is damaged, or has a function or class that is not allowed.
    """
    saved = dcp.read_dcp_folder(folder)
    held: dict[str, MegatronTensor] = {}
    with dcp.convert_dcp_metadata_errors(folder):
        tensors = join_local_shards({_strip_nemo_prefix(key): one for key, one in saved.tensors.items()})
        for key, one in tensors.items():
            if not key.startswith(_OTHERS) and not key.endswith("._extra_state"):
                _add_layers(held, key, one.shape, one.dtype, one.chunks)
        kinds = _optimizer_tensors(tensors)
    common = _read_common_state(folder, saved.entries)
    schedule = common.get("opt_param_scheduler")
    by_rank = {name[1] for key in saved.keys if (name := _BUCKET_STATE.match(key))}.difference(_OBJECTS)
    return MegatronContents(
        "torch_dist",
        namespace_attributes(common.get("args")) | infer_megatron_args_from_names(held),
        _integer_of(common, "iteration"),
        len(held),
        lambda _: held,
        _integer_of(schedule, "num_steps"),
        MegatronOptimizerState(kinds, lambda: _optimizer_objects(common, saved.entries), _BUCKETS if by_rank else ""),
    )


def _strip_nemo_prefix(key: str) -> str:
    """Return the name without NeMo's module wrapper, also inside the name of optimizer state."""
    return _WRAPPER.sub(r"\1", key, count=1)


def _integer_of(mapping: Any, name: str) -> int | None:
    """Return an integer value of a mapping, or None."""
    value = mapping.get(name) if isinstance(mapping, Mapping) else None
    return value if isinstance(value, int) else None


def _optimizer_tensors(tensors: Mapping[str, DcpSavedTensor]) -> dict[str, dict[str, MegatronTensor]]:
    """Return the optimizer's tensors by kind."""
    out: dict[str, dict[str, MegatronTensor]] = defaultdict(dict)
    for key, one in tensors.items():
        found = _WEIGHT_STATE.fullmatch(key)
        if not found or found[2] not in tensors:
            continue
        chunks, shape, weight = one.chunks, one.shape, tensors[found[2]].shape
        if len(shape) == len(weight) + 1:
            chunks = [part for chunk in chunks for part in _unflatten_chunk(chunk, shape[:-1], weight)]
            shape = weight
        _add_layers(out[found[1]], found[2], shape, one.dtype, chunks)
    return out


def _unflatten_chunk(chunk: StoredTensorSlice, grid: TensorShape, shape: TensorShape) -> Iterator[StoredTensorSlice]:
    """Yield the rectangles of a chunk of a tensor that is stored as a grid of flattened cells [*grid, elements].

    Older versions store it so with `fully_sharded_model_space`; a cell is the part of one model-parallel rank.
    """
    *cell, start = chunk.offset
    size = tuple(n // parts for n, parts in zip(shape, grid, strict=True))

    def reader(first: int, extent: TensorShape) -> Callable[[], Tensor]:
        return lambda: chunk.read().reshape(-1)[first : first + math.prod(extent)].view(extent)

    for low, extent, first in split_flat_range(size, start, start + chunk.shape[-1]):
        offset = tuple(at * n + o for at, n, o in zip(cell, size, low, strict=True))
        yield StoredTensorSlice(offset, extent, reader(first - start, extent))


def _optimizer_objects(common: Mapping[str, Any], entries: DcpEntries) -> list[Any]:
    """Return the optimizer's objects that are not tensors: from the common state, or from separate objects."""
    found = [(_BUCKET_STATE.match(key), entry) for (key, offset), entry in entries.items() if offset is None]
    return [common.get("optimizer"), *(entry.archived_value for name, entry in found if name and name[1] in _OBJECTS)]


def _read_common_state(folder: Path, entries: DcpEntries) -> Mapping[str, Any]:
    """Return the state that is not tensors: from a file, an object, or empty."""
    if (folder / COMMON).exists():
        value = load_torch_archive(folder / COMMON)
    else:
        entry = entries.get((COMMON_OBJECT, None))
        value = entry.archived_value if entry else {}
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return value if isinstance(value, dict) else {}


def _add_layers(
    held: dict[str, MegatronTensor],
    key: str,
    shape: TensorShape,
    dtype: torch.dtype,
    chunks: Sequence[StoredTensorSlice],
) -> None:
    """Add a tensor, split into layers, under the names of the single layers."""
    head, tail = split_megatron_layer_prefix(key)
    if _CONV1D.fullmatch(tail) and len(shape) == 3:
        chunks, shape = [_drop_conv_axis(chunk) for chunk in chunks], (shape[0], shape[2])
    stacked = head in STACKS
    if stacked and shape[0] > MAX_LAYERS:
        raise CheckpointError(f"{key}: must have at most {MAX_LAYERS} layers, not {shape[0]}")
    if stacked and shape[0] > len(chunks) * max((chunk.shape[0] for chunk in chunks), default=0):
        raise CheckpointError(f"the shards of {key} are incomplete: it has {shape[0]} layers")
    for layer in range(shape[0]) if stacked else (None,):
        name = normalize_megatron_tensor_name(key if layer is None else f"{head}{layer}.{tail}")
        held[name] = MegatronTensor(dtype, shape if layer is None else shape[1:])
    for chunk in chunks:
        if not stacked:
            held[normalize_megatron_tensor_name(key)].stored_boxes.append(chunk)
            continue
        for row in range(chunk.shape[0]):
            name = normalize_megatron_tensor_name(f"{head}{chunk.offset[0] + row}.{tail}")
            held[name].stored_boxes.append(
                StoredTensorSlice(chunk.offset[1:], chunk.shape[1:], _row_reader(chunk, row))
            )


def _drop_conv_axis(chunk: StoredTensorSlice) -> StoredTensorSlice:
    (first, _, last), (rows, _, taps) = chunk.offset, chunk.shape
    return StoredTensorSlice((first, last), (rows, taps), lambda: chunk.read().squeeze(1))


def _row_reader(chunk: StoredTensorSlice, row: int) -> Callable[[], Tensor]:
    return lambda: chunk.read()[row]
