"""DeepSpeed's folders: weights and Adam's moments, out of the stretches that its ranks keep.

    global_step100/*_model_states.pt, *_optim_states.pt      ZeRO-1 to 3, and without ZeRO the first alone
    zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt  universal checkpoints

The fp32 weights that the optimizer keeps are read, as its own `zero_to_fp32` does: with ZeRO-1 and 2 each rank has a stretch of
a group's parameters one after another, with ZeRO-3 of every parameter its part. Moments lie as the weights do.
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
from mega_ckpt.formats.disk import Stored
from mega_ckpt.formats.named_state import NamedState, number, plain
from mega_ckpt.formats.numbered_state import with_moments
from mega_ckpt.formats.torch_archive import StoredTensor, load_archive
from mega_ckpt.training import MOMENTS
from mega_common.errors import CheckpointError

MODEL_STATES, OPTIM_STATES = "*_model_states.pt", "*_optim_states.pt"
Flat = Sequence[StoredTensor]  # what a rank has of each group of parameters


def universal_state(folder: Path) -> NamedState:
    """Of a folder with `zero/`: one for each parameter, with its fp32 weights and moments, flat where they come from ZeRO-3.

    Raises:
        CheckpointError: when a file holds no tensor.
    """
    model = next(map(_mapping, _by_rank(folder, MODEL_STATES)), {})
    shapes = {name: tuple(shape) for group in model.get("param_shapes") or () for name, shape in group.items()}
    held: dict[str, dict[str, Stored]] = {kind: {} for kind in ("fp32", *MOMENTS)}
    for kind, tensors in held.items():
        for path in sorted(folder.glob(f"zero/*/{kind}.pt")):
            value, name = load_archive(path), path.parent.name
            one = value.get("param") if isinstance(value, Mapping) else value
            if not isinstance(one, StoredTensor):
                raise CheckpointError(f"{path}: holds no tensor")
            tensors[name] = _shaped(path, one, shapes.get(name, one.shape))
    steps = {number(load_archive(path)) for path in folder.glob("zero/*/step.pt")} or {_updates(model)}
    return NamedState(
        held.pop("fp32"), held, steps.pop() if len(steps) == 1 else None, number(model.get("global_samples"))
    )


def _shaped(path: Path, one: StoredTensor, shape: tuple[int, ...]) -> Stored:
    """A tensor as one of so many elements has it."""
    if math.prod(shape) != math.prod(one.shape):
        raise CheckpointError(f"{path}: has {math.prod(one.shape)} elements instead of {math.prod(shape)}")
    return Stored(path, one.dtype, shape, lambda: one.read().reshape(shape))


def _updates(model: Mapping[str, Any]) -> int | None:
    """Steps that were not skipped."""
    steps = number(model.get("global_steps"))
    return None if steps is None else steps - (number(model.get("skipped_steps")) or 0)


def zero_state(folder: Path) -> NamedState:
    """Of a step's folder: fp32 weights and moments from the optimizer's files, buffers and frozen weights from the model's.

    Raises:
        CheckpointError: when files are missing, or are not as DeepSpeed writes them.
    """
    models = [_mapping(path) for path in _by_rank(folder, MODEL_STATES)]
    if len({path.name.rpartition("mp_rank_")[2] for path in folder.glob(MODEL_STATES)}) > 1:
        raise CheckpointError(
            f"{folder}: its weights are split over tensor ranks, which only the program that split them can join"
        )
    model = models[0]
    held = {name: plain(folder, one) for name, one in _module(model, folder).items() if isinstance(one, StoredTensor)}
    states = [_mapping(path).get("optimizer_state_dict") for path in _by_rank(folder, OPTIM_STATES)]
    if not states:
        return _unshared(folder, model, held)
    with dcp.failing(f"{folder}: its files are not laid out as DeepSpeed does"):
        found, moments, steps = _from_partitions(folder, states, model)
        kept = set(model.get("buffer_names") or ())
        found |= {name: held[name] for name in held if name in kept and name not in found}
        for copy, name in model.get("shared_params") or ():
            found.setdefault(copy, found[name])
        frozen = set(model.get("frozen_param_shapes") or ()) - found.keys()
    if frozen and not frozen <= held.keys():
        raise CheckpointError(f"{folder}: frozen weights, such as {min(frozen)}, are not in its files whole")
    found |= {name: held[name] for name in frozen}
    return NamedState(found, moments, steps, number(model.get("global_samples")))


def _unshared(folder: Path, model: Mapping[str, Any], held: Mapping[str, Stored]) -> NamedState:
    """Of a run without ZeRO, whose optimizer may be torch's as it is, by the number of each parameter."""
    optimizer = model.get("optimizer")
    if not isinstance(optimizer, Mapping) or not {"state", "param_groups"} <= optimizer.keys():
        return NamedState(held)
    buffers = set(model.get("buffer_names") or ())
    weights = {name: one for name, one in _module(model, folder).items() if name in held and name not in buffers}
    found = with_moments(folder, weights, optimizer)
    return replace(found, weights=held, steps=_updates(model), samples=number(model.get("global_samples")))


def _from_partitions(
    folder: Path, states: Sequence[Any], model: Mapping[str, Any]
) -> tuple[dict[str, Stored], dict[str, dict[str, Stored]], int | None]:
    """Weights, moments by kind, and the updates that these have seen."""
    stage, shapes = number(states[0]["zero_stage"]), model["param_shapes"]
    if len(states) != _ranks(states[0]["partition_count"]):
        raise CheckpointError(
            f"{folder}: files of {len(states)} ranks instead of {states[0]['partition_count']}",
            hint="copy the checkpoint of every node into one folder",
        )
    placed = _by_stretches if stage in (1, 2) else _by_parts
    key = "single_partition_of_fp32_groups" if stage in (1, 2) else "fp32_flat_groups"
    weights = placed(folder, [[*state[key]] for state in states], shapes)
    groups = len(states[0][key])
    adams = [_adam(state, groups) for state in states]
    if not all(adams):
        return weights, {}, None
    moments = {kind: placed(folder, [[one[kind] for one in adam] for adam in adams], shapes) for kind in MOMENTS}
    return weights, moments, number(adams[0][0].get("step"))


def _adam(state: Mapping[str, Any], groups: int) -> list[Mapping[str, Any]]:
    """What Adam keeps of each group on a rank; empty where that is no Adam, or one that has not begun."""
    saved = state.get("optimizer_state_dict") or state.get("base_optimizer_state")
    by_group = saved.get("state") if isinstance(saved, Mapping) else None
    found = [by_group.get(group) for group in range(groups)] if isinstance(by_group, Mapping) else []
    if not all(
        isinstance(one, Mapping) and all(isinstance(one.get(kind), StoredTensor) for kind in MOMENTS) for one in found
    ):
        return []
    return [one for one in found if one is not None]


def _by_stretches(folder: Path, flat: Sequence[Flat], shapes: Sequence[Mapping[str, Any]]) -> dict[str, Stored]:
    """ZeRO-1 and 2: the parameters of a group one after another, cut among the ranks."""
    found = {}
    for group, params in enumerate(shapes):
        parts, at = [rank[group] for rank in flat], 0
        for name, shape in params.items():
            size = math.prod(shape)
            read: Callable[[], Tensor] = partial(_stretch, parts, at, at + size, tuple(shape))
            found[name] = Stored(folder, parts[0].dtype, tuple(shape), read, costly=True)
            at += size
        if at > sum(part.shape[0] for part in parts):
            raise ValueError("the partitions are shorter than the parameters")
    return found


def _by_parts(folder: Path, flat: Sequence[Flat], shapes: Sequence[Mapping[str, Any]]) -> dict[str, Stored]:
    """ZeRO-3: of every parameter a part on each rank, through all groups."""
    found, at = {}, 0
    for name, shape in ((name, shape) for params in shapes for name, shape in params.items()):
        part = -(-math.prod(shape) // len(flat))
        read: Callable[[], Tensor] = partial(_gathered, flat, at, part, tuple(shape))
        found[name] = Stored(folder, flat[0][0].dtype, tuple(shape), read, costly=True)
        at += part
    if any(at > sum(group.shape[0] for group in groups) for groups in flat):
        raise ValueError("the partitions are shorter than the parameters")
    return found


def _stretch(parts: Flat, begin: int, end: int, shape: tuple[int, ...]) -> Tensor:
    """Elements [begin, end) of tensors one after another."""
    out, start = [], 0
    for part in parts:
        stop = start + part.shape[0]
        if begin < stop and start < end:
            out.append(part.read()[max(0, begin - start) : end - start])
        start = stop
    return torch.cat(out).view(shape) if out else torch.empty(shape, dtype=parts[0].dtype)


def _gathered(flat: Sequence[Flat], at: int, part: int, shape: tuple[int, ...]) -> Tensor:
    """Of a parameter, each rank's part, which stands at the same place."""
    parts = [_stretch(groups, at, at + part, (part,)) for groups in flat]
    return torch.cat(parts)[: math.prod(shape)].view(shape)


def _ranks(count: Any) -> int:
    return max(count) if isinstance(count, list | tuple) else int(count)


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """Files of ranks, 10 behind 9."""
    return sorted(folder.glob(pattern), key=lambda path: [int(found) for found in re.findall(r"\d+", path.name)])


def _mapping(path: Path) -> Mapping[str, Any]:
    value = load_archive(path)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path}: is no checkpoint of a trainer")
    return value


def _module(model: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    module = model.get("module")
    if not isinstance(module, Mapping):
        raise CheckpointError(f"{folder}: its files of the model hold no `module`")
    return module
