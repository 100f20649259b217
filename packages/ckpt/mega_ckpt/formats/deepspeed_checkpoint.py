"""DeepSpeed checkpoints: fp32 weights and Adam moments, reassembled from the ZeRO partitions of its ranks.

    global_step100/*_model_states.pt, *_optim_states.pt      ZeRO-1 to 3; without ZeRO only the first
    zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt  universal checkpoints

Like DeepSpeed's `zero_to_fp32`, it reads the fp32 weights of the optimizer: with ZeRO-1 and 2 each rank has a range of
the concatenated parameters of a group, with ZeRO-3 a part of every parameter. Moments are sharded like the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.formats import dcp
from mega_ckpt.formats.adam_state import NamedAdamState, attach_adam_moments, parse_integer, to_lazy_tensor
from mega_ckpt.formats.disk_source import LazyTensor
from mega_ckpt.formats.torch_archive import StoredTensor, load_torch_archive
from mega_ckpt.weight_source import MOMENTS
from mega_common.errors import CheckpointError

MODEL_STATES, OPTIM_STATES = "*_model_states.pt", "*_optim_states.pt"
FlatPartitions = Sequence[StoredTensor]  # partitions of one rank, one per parameter group


def read_universal_checkpoint(folder: Path) -> NamedAdamState:
    """Read fp32 weights and Adam moments from a DeepSpeed universal checkpoint.
    The folder `zero/` in `folder` has one folder per parameter. Parameters are flattened if they come from ZeRO-3.

    Raises:
        CheckpointError: when a file has no tensor.
    """
    model = next(map(_load_mapping, _rank_files(folder, MODEL_STATES)), {})
    shapes = {name: tuple(shape) for group in model.get("param_shapes") or () for name, shape in group.items()}
    found: dict[str, dict[str, LazyTensor]] = {kind: {} for kind in ("fp32", *MOMENTS)}
    for kind, tensors in found.items():
        for path in sorted(folder.glob(f"zero/*/{kind}.pt")):
            value, name = load_torch_archive(path), path.parent.name
            one = value.get("param") if isinstance(value, Mapping) else value
            if not isinstance(one, StoredTensor):
                raise CheckpointError(f"{path}: must have a tensor", hint="copy the checkpoint again")
            tensors[name] = _reshaped(path, one, shapes.get(name, one.shape))
    steps = {parse_integer(load_torch_archive(path)) for path in folder.glob("zero/*/step.pt")} or {
        _count_updates(model)
    }
    return NamedAdamState(
        found.pop("fp32"), found, steps.pop() if len(steps) == 1 else None, parse_integer(model.get("global_samples"))
    )


def _reshaped(path: Path, one: StoredTensor, shape: tuple[int, ...]) -> LazyTensor:
    """Return a stored tensor in another shape with the same number of elements."""
    if math.prod(shape) != math.prod(one.shape):
        raise CheckpointError(f"{path}: has {math.prod(one.shape)} elements instead of {math.prod(shape)}")
    return LazyTensor(path, one.dtype, shape, lambda: one.read().reshape(shape))


def _count_updates(model: Mapping[str, Any]) -> int | None:
    """Return the number of steps that were not skipped."""
    steps = parse_integer(model.get("global_steps"))
    return None if steps is None else steps - (parse_integer(model.get("skipped_steps")) or 0)


def read_zero_checkpoint(folder: Path) -> NamedAdamState:
    """Read the weights and Adam moments of one step from a DeepSpeed checkpoint folder.
    Fp32 weights and Adam moments are in the optimizer files, buffers and frozen weights in the model files.

    Raises:
        CheckpointError: when files are missing, or do not have DeepSpeed's format.
    """
    models = [_load_mapping(path) for path in _rank_files(folder, MODEL_STATES)]
    if len({path.name.rpartition("mp_rank_")[2] for path in folder.glob(MODEL_STATES)}) > 1:
        raise CheckpointError(
            f"{folder}: weights that are sharded by tensor parallelism are not supported",
            hint="join them with the program that trained the model",
        )
    model = models[0]
    held = {
        name: to_lazy_tensor(folder, one)
        for name, one in _module_state(model, folder).items()
        if isinstance(one, StoredTensor)
    }
    states = [_load_mapping(path).get("optimizer_state_dict") for path in _rank_files(folder, OPTIM_STATES)]
    if not states:
        return _without_zero(folder, model, held)
    with dcp.convert_parse_errors(f"{folder}: its files do not have DeepSpeed's format"):
        found, moments, steps = _from_partitions(folder, states, model)
        buffers = set(model.get("buffer_names") or ())
        found |= {name: held[name] for name in held if name in buffers and name not in found}
        for copy, name in model.get("shared_params") or ():
            found.setdefault(copy, found[name])
        frozen = set(model.get("frozen_param_shapes") or ()) - found.keys()
    if frozen and not frozen <= held.keys():
        raise CheckpointError(
            f"{folder}: frozen weights, such as {min(frozen)}, are not saved whole",
            hint="save the model with exclude_frozen_parameters=False and gathered weights",
        )
    found |= {name: held[name] for name in frozen}
    return NamedAdamState(found, moments, steps, parse_integer(model.get("global_samples")))


def _without_zero(folder: Path, model: Mapping[str, Any], held: Mapping[str, LazyTensor]) -> NamedAdamState:
    """Return the state of a run without ZeRO, whose optimizer may be a plain torch optimizer with numbered parameters."""
    optimizer = model.get("optimizer")
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= optimizer.keys():
        return NamedAdamState(held)
    buffers = set(model.get("buffer_names") or ())
    weights = {name: one for name, one in _module_state(model, folder).items() if name in held and name not in buffers}
    found = attach_adam_moments(folder, weights, optimizer)
    return replace(found, weights=held, steps=_count_updates(model), samples=parse_integer(model.get("global_samples")))


def _from_partitions(
    folder: Path, states: Sequence[Any], model: Mapping[str, Any]
) -> tuple[dict[str, LazyTensor], dict[str, dict[str, LazyTensor]], int | None]:
    """Return the weights, the moments by kind, and the number of updates."""
    stage, shapes = parse_integer(states[0]["zero_stage"]), model["param_shapes"]
    if len(states) != _partition_count(states[0]["partition_count"]):
        raise CheckpointError(
            f"{folder}: has files of {len(states)} ranks instead of {states[0]['partition_count']}",
            hint="copy the checkpoint of every node into one folder",
        )
    reassemble = _zero12_tensors if stage in (1, 2) else _zero3_tensors
    key = "single_partition_of_fp32_groups" if stage in (1, 2) else "fp32_flat_groups"
    weights = reassemble(folder, [[*state[key]] for state in states], shapes)
    groups = len(states[0][key])
    adams = [_adam_states(state, groups) for state in states]
    if not all(adams):
        return weights, {}, None
    moments = {kind: reassemble(folder, [[one[kind] for one in adam] for adam in adams], shapes) for kind in MOMENTS}
    return weights, moments, parse_integer(adams[0][0].get("step"))


def _adam_states(state: Mapping[str, Any], groups: int) -> list[Mapping[str, Any]]:
    """Return Adam's state of each parameter group on a rank; empty for another optimizer or before the first step."""
    saved = state.get("optimizer_state_dict") or state.get("base_optimizer_state")
    by_group = saved.get("state") if isinstance(saved, Mapping) else None
    found = [by_group.get(group) for group in range(groups)] if isinstance(by_group, Mapping) else []
    if not all(
        isinstance(one, Mapping) and all(isinstance(one.get(kind), StoredTensor) for kind in MOMENTS) for one in found
    ):
        return []
    return [one for one in found if one is not None]


def _zero12_tensors(
    folder: Path, flat: Sequence[FlatPartitions], shapes: Sequence[Mapping[str, Any]]
) -> dict[str, LazyTensor]:
    """Return the tensors of ZeRO-1 and 2: the concatenated parameters of a group are partitioned among the ranks."""
    found = {}
    for group, params in enumerate(shapes):
        parts, at = [rank[group] for rank in flat], 0
        for name, shape in params.items():
            size = math.prod(shape)
            read: Callable[[], Tensor] = partial(_read_flat_range, parts, at, at + size, tuple(shape))
            found[name] = LazyTensor(folder, parts[0].dtype, tuple(shape), read, costly=True)
            at += size
        if at > sum(part.shape[0] for part in parts):
            raise ValueError("the partitions are shorter than the parameters")
    return found


def _zero3_tensors(
    folder: Path, flat: Sequence[FlatPartitions], shapes: Sequence[Mapping[str, Any]]
) -> dict[str, LazyTensor]:
    """Return the tensors of ZeRO-3: each rank has a part of every parameter, across all groups."""
    found, at = {}, 0
    for name, shape in ((name, shape) for params in shapes for name, shape in params.items()):
        part = -(-math.prod(shape) // len(flat))
        read: Callable[[], Tensor] = partial(_gather_parameter, flat, at, part, tuple(shape))
        found[name] = LazyTensor(folder, flat[0][0].dtype, tuple(shape), read, costly=True)
        at += part
    if any(at > sum(group.shape[0] for group in groups) for groups in flat):
        raise ValueError("the partitions are shorter than the parameters")
    return found


def _read_flat_range(parts: FlatPartitions, begin: int, end: int, shape: tuple[int, ...]) -> Tensor:
    """Return elements [begin, end) of concatenated tensors."""
    out, start = [], 0
    for part in parts:
        stop = start + part.shape[0]
        if begin < stop and start < end:
            out.append(part.read()[max(0, begin - start) : end - start])
        start = stop
    return torch.cat(out).view(shape) if out else torch.empty(shape, dtype=parts[0].dtype)


def _gather_parameter(flat: Sequence[FlatPartitions], at: int, part: int, shape: tuple[int, ...]) -> Tensor:
    """Return a parameter from the parts of all ranks, which are at the same position."""
    parts = [_read_flat_range(groups, at, at + part, (part,)) for groups in flat]
    return torch.cat(parts)[: math.prod(shape)].view(shape)


def _partition_count(count: Any) -> int:
    return max(count) if isinstance(count, list | tuple) else int(count)


def _rank_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of the ranks in numerical order."""
    return sorted(folder.glob(pattern), key=lambda path: [int(found) for found in re.findall(r"\d+", path.name)])


def _load_mapping(path: Path) -> Mapping[str, Any]:
    value = load_torch_archive(path)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path}: must be a state dict, but is another object")
    return value


def _module_state(model: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    module = model.get("module")
    if not isinstance(module, Mapping):
        raise CheckpointError(f"{folder}: `module` is missing in its model files")
    return module
