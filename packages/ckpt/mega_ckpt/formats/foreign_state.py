"""Weights as other trainers leave them, beside a model's config.json: names are HuggingFace's, under what wraps the model.

    FSDP, torchtitan's export, Accelerate     .metadata and *.distcp, in the folder or in one below it (`dcp`)
    DeepSpeed ZeRO-1 to 3                     latest, global_step100/*_model_states.pt, *_optim_states.pt
    DeepSpeed's universal checkpoints         zero/<name>/fp32.pt
    Lightning                                 one *.ckpt

Of DeepSpeed the fp32 weights that the optimizer keeps are read, as its own `zero_to_fp32` does: with ZeRO-1 and 2 each rank has a
stretch of a group's parameters one after another, with ZeRO-3 of every parameter its part. Only weights are read, no moments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.formats import dcp
from mega_ckpt.formats.disk import Stored
from mega_ckpt.formats.torch_archive import StoredTensor, load_archive
from mega_common.errors import CheckpointError

LATEST, MODEL_STATES, OPTIM_STATES = "latest", "*_model_states.pt", "*_optim_states.pt"
# Parts of a name that say who wrapped a module, not where it is.
WRAPPERS = ("_forward_module.", "_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.", "module.")
_OPTIMIZER = re.compile(r"(optimizer|optim|optimizers)[._]")


def foreign_tensors(folder: Path) -> Mapping[str, Stored] | None:
    """The tensors of a folder of one of these kinds, by names without wrappers; None where it is of none.

    Raises:
        CheckpointError: when files are missing or damaged, or hold what is none of these.
    """
    for inside in _places(folder):
        if (inside / dcp.METADATA).is_file():
            saved = dcp.read(inside).tensors.items()
            held = {key: _whole(inside, one) for key, one in saved if not _OPTIMIZER.match(key)}
            return {_unwrapped(key): stored for key, stored in held.items()}
        if (inside / "zero").is_dir():
            return _universal(inside / "zero")
        if any(inside.glob(MODEL_STATES)):
            return _zero(inside)
    archives = sorted(folder.glob("*.ckpt"))
    if len(archives) > 1:
        names = ", ".join(path.name for path in archives)
        raise CheckpointError(f"{folder}: holds several checkpoints of Lightning: {names}", hint="leave one there")
    return _lightning(archives[0]) if archives else None


def unprefixed(tensors: Mapping[str, Stored], expected: set[str]) -> Mapping[str, Stored]:
    """The tensors by the names that a model has, some of which are `expected`, without what all have in front."""
    prefixes = [""] + [name[: len(name) - len(one)] for one in expected for name in tensors if name.endswith(f".{one}")]
    best = max(prefixes, key=lambda prefix: (sum(prefix + one in tensors for one in expected), -len(prefix)))
    return {name.removeprefix(best): stored for name, stored in tensors.items()}


def _places(folder: Path) -> Iterator[Path]:
    """The folder, what its `latest` names, and the one folder below it that is a checkpoint of torch.distributed."""
    yield folder
    if (folder / LATEST).is_file():
        name = (folder / LATEST).read_text().strip()
        if not re.fullmatch(r"[\w.+-]+", name) or not (folder / name).is_dir():
            raise CheckpointError(f"{folder / LATEST}: names {name!r}, which is no folder beside it")
        yield folder / name
    below = sorted(path.parent for path in folder.glob(f"*/{dcp.METADATA}"))
    below = [path for path in below if not _OPTIMIZER.match(f"{path.name}_")]
    if len(below) > 1:
        names = ", ".join(path.name for path in below)
        raise CheckpointError(f"{folder}: holds several checkpoints: {names}", hint="put config.json into one of them")
    yield from below


def _whole(folder: Path, one: dcp.Saved) -> Stored:
    return Stored(folder / dcp.METADATA, one.dtype, one.shape, one.read, costly=len(one.chunks) > 1)


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


# -------------------------------------------------------------------------------------------------------------- DeepSpeed


def _zero(folder: Path) -> dict[str, Stored]:
    """Of a step's folder: fp32 weights from the optimizer's files, buffers and frozen weights from the model's."""
    models = [_mapping(path) for path in _by_rank(folder, MODEL_STATES)]
    if len({path.name.rpartition("mp_rank_")[2] for path in folder.glob(MODEL_STATES)}) > 1:
        raise CheckpointError(
            f"{folder}: its weights are split over tensor ranks, which only the program that split them can join"
        )
    model = models[0]
    held = {name: _plain(folder, one) for name, one in _module(model, folder).items() if isinstance(one, StoredTensor)}
    states = [_mapping(path).get("optimizer_state_dict") for path in _by_rank(folder, OPTIM_STATES)]
    if not states:
        return {_unwrapped(name): stored for name, stored in held.items()}
    with dcp.failing(f"{folder}: its files are not laid out as DeepSpeed does"):
        found = _from_partitions(folder, states, model)
        kept = set(model.get("buffer_names") or ())
        found |= {name: held[name] for name in held if name in kept and name not in found}
        for copy, name in model.get("shared_params") or ():
            found.setdefault(copy, found[name])
        frozen = set(model.get("frozen_param_shapes") or ()) - found.keys()
    if frozen and not frozen <= held.keys():
        raise CheckpointError(f"{folder}: frozen weights, such as {min(frozen)}, are not in its files whole")
    found |= {name: held[name] for name in frozen}
    return {_unwrapped(name): stored for name, stored in found.items()}


def _from_partitions(folder: Path, states: Sequence[Any], model: Mapping[str, Any]) -> dict[str, Stored]:
    stage, shapes = states[0]["zero_stage"], model["param_shapes"]
    if len(states) != _ranks(states[0]["partition_count"]):
        raise CheckpointError(
            f"{folder}: files of {len(states)} ranks instead of {states[0]['partition_count']}",
            hint="copy the checkpoint of every node into one folder",
        )
    read: Callable[[], Tensor]
    found = {}
    if stage <= 2:
        for group, params in enumerate(shapes):
            parts, at = [state["single_partition_of_fp32_groups"][group] for state in states], 0
            for name, shape in params.items():
                size = math.prod(shape)
                read = partial(_stretch, parts, at, at + size, tuple(shape))
                found[name] = Stored(folder, parts[0].dtype, tuple(shape), read, costly=True)
                at += size
            if at > sum(part.shape[0] for part in parts):
                raise ValueError("the partitions are shorter than the parameters")
        return found
    flat = [[*state["fp32_flat_groups"]] for state in states]
    at = 0
    for name, shape in ((name, shape) for params in shapes for name, shape in params.items()):
        part = -(-math.prod(shape) // len(states))
        read = partial(_gathered, flat, at, part, tuple(shape))
        found[name] = Stored(folder, flat[0][0].dtype, tuple(shape), read, costly=True)
        at += part
    if any(at > sum(group.shape[0] for group in groups) for groups in flat):
        raise ValueError("the partitions are shorter than the parameters")
    return found


def _stretch(parts: Sequence[StoredTensor], begin: int, end: int, shape: tuple[int, ...]) -> Tensor:
    """Elements [begin, end) of tensors one after another."""
    out, start = [], 0
    for part in parts:
        stop = start + part.shape[0]
        if begin < stop and start < end:
            out.append(part.read()[max(0, begin - start) : end - start])
        start = stop
    return torch.cat(out).view(shape) if out else torch.empty(shape, dtype=parts[0].dtype)


def _gathered(flat: Sequence[Sequence[StoredTensor]], at: int, part: int, shape: tuple[int, ...]) -> Tensor:
    """Of a parameter, each rank's part, which stands at the same place."""
    parts = [_stretch(groups, at, at + part, (part,)) for groups in flat]
    return torch.cat(parts)[: math.prod(shape)].view(shape)


def _universal(folder: Path) -> dict[str, Stored]:
    """A folder for each parameter, with its fp32 weights in `param`."""
    found = {}
    for path in sorted(folder.glob("*/fp32.pt")):
        value = load_archive(path)
        one = value.get("param") if isinstance(value, Mapping) else value
        if not isinstance(one, StoredTensor):
            raise CheckpointError(f"{path}: holds no tensor")
        found[_unwrapped(path.parent.name)] = _plain(path, one)
    return found


def _ranks(count: Any) -> int:
    return max(count) if isinstance(count, list | tuple) else int(count)


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """Files of ranks, 10 behind 9."""
    return sorted(folder.glob(pattern), key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


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


# -------------------------------------------------------------------------------------------------------------- Lightning


def _lightning(path: Path) -> dict[str, Stored]:
    state = _mapping(path).get("state_dict")
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: has no `state_dict`, as checkpoints of Lightning have")
    return {_unwrapped(str(name)): _plain(path, one) for name, one in state.items() if isinstance(one, StoredTensor)}


def _plain(path: Path, one: StoredTensor) -> Stored:
    return Stored(path, one.dtype, one.shape, one.read)
