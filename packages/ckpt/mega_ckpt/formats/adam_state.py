"""Adam moments of other trainers, by name or by parameter number: in `torch.optim.Optimizer.state_dict`, and in
Colossal-AI's split files.

    {"state": {0: {"step", "exp_avg", "exp_avg_sq"}, ...}, "param_groups": [{"params": [0, ...], ...}]}

Parameters are called by their number, in the order in which the optimizer was given them. Given all of a model's in one group,
as `model.parameters()` has them, these are the weights in the order of the model's own state. Names, where there are some, are
in `param_names` of the groups, or stand for the numbers (`FSDP.optim_state_dict`).

    modeling/     pytorch_model.bin, or pytorch_model.bin.index.json and its shards
    optimizer/    pytorch_optim.bin.index.json, pytorch_optim_group.bin (`param_groups`), pytorch_optim-00001.bin (of `state`)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mega_ckpt.formats.dcp import malformed_as_error
from mega_ckpt.formats.disk_source import LazyTensor
from mega_ckpt.formats.safe_pickles import InertObject
from mega_ckpt.formats.torch_archive import StoredTensor, load_torch_archive
from mega_ckpt.training_state import MOMENTS
from mega_common.errors import CheckpointError


@dataclass(frozen=True)
class NamedAdamState:
    """Weights and Adam moments in another trainer's folder, by the names of the weights.

    Attributes:
        weights: by name.
        moments: by kind (`exp_avg`, `exp_avg_sq`) and the name of the weight; empty where there are none, or nobody knows whose they are.
        steps: updates that the moments have seen, if it says so.
        samples: read until then, if it says so.
        missing_reason: why there are no moments, where there are none.
    """

    weights: Mapping[str, LazyTensor]
    moments: Mapping[str, Mapping[str, LazyTensor]] = field(default_factory=dict)
    steps: int | None = None
    samples: int | None = None
    missing_reason: str = "there are no moments of Adam by the names of the weights"

    def rename_weights(self, name: Callable[[str], str]) -> NamedAdamState:
        """Return the state with renamed weights."""
        moments = {kind: {name(key): one for key, one in held.items()} for kind, held in self.moments.items()}
        weights = {name(key): one for key, one in self.weights.items()}
        return replace(self, weights=weights, moments=moments)


def to_lazy_tensor(path: Path, one: StoredTensor) -> LazyTensor:
    """Return a tensor that is stored unsharded in a file."""
    return LazyTensor(path, one.dtype, one.shape, one.read)


def parse_integer(value: Any) -> int | None:
    """Return an integer, which may be stored as a tensor with one element, or as the value of an enumeration."""
    if isinstance(value, InertObject) and len(value.args) == 1:
        (value,) = value.args
    if isinstance(value, StoredTensor | LazyTensor):
        value = value.read().reshape(-1)[:1].sum().item()
    return int(value) if isinstance(value, int | float) else None


SHARDED, GROUPS = "pytorch_optim.bin.index.json", "pytorch_optim_group.bin"
BESIDE = "optimizer"  # Colossal-AI's folder of the optimizer's state, beside that of the weights
BY_NUMBER = "the moments are kept by the number of a parameter"


def attach_moments(path: Path, weights: Mapping[str, StoredTensor], optimizer: Mapping[Any, Any]) -> NamedAdamState:
    """Return the weights with the moments of an optimizer that got the weights in the order of `weights`."""
    held = {name: to_lazy_tensor(one.path, one) for name, one in weights.items()}
    return name_moments(path, held, optimizer, [[_distinct_names(weights)]])


def name_moments(
    path: Path, held: Mapping[str, LazyTensor], optimizer: Mapping[Any, Any], orders: Sequence[Sequence[Sequence[str]]]
) -> NamedAdamState:
    """Return the weights with the moments by name; the weights alone, and the reason, if the order of the parameters is
    unknown.

    Args:
        path: the file that the moments are in, for messages.
        held: the weights of the whole model.
        optimizer: the optimizer's state.
        orders: of the names that it may have been given, by group; the first with as many in each counts.

    Raises:
        CheckpointError: when that is not laid out so.
    """
    with malformed_as_error(f"{path}: not the state of an optimizer of torch"):
        groups, state = optimizer["param_groups"], optimizer["state"]
        keys = [key for group in groups for key in group["params"]]
        names = [name for group in groups for name in group.get("param_names", ())] or keys
        if not all(isinstance(name, str) for name in names):
            counts = [len(group["params"]) for group in groups]
            order = next((order for order in orders if [len(group) for group in order] == counts), None)
            if order is None:
                counted = f"{len(keys)} in {len(groups)} groups, the weights are {sum(map(len, orders[0]))}"
                return NamedAdamState(held, missing_reason=f"{BY_NUMBER}, {counted}")
            names = [name for group in order for name in group]
        told = dict(zip(names, (state.get(key, {}) for key in keys), strict=True))
        if any(
            name in held and kind in one and one[kind].shape != held[name].shape
            for name, one in told.items()
            for kind in MOMENTS
        ):
            return NamedAdamState(held, missing_reason=f"{BY_NUMBER}, in another order than the weights")
        moments = {
            kind: {name: to_lazy_tensor(one[kind].path, one[kind]) for name, one in told.items() if kind in one}
            for kind in MOMENTS
        }
        steps = {parse_integer(one["step"]) for one in told.values() if "step" in one}
    return NamedAdamState(held, moments, steps.pop() if len(steps) == 1 else None)


def read_colossalai_state(folder: Path, files: Mapping[str, Mapping[str, StoredTensor]]) -> NamedAdamState | None:
    """Return weights that Colossal-AI saved in `folder`, file by file in order, with the moments next to them; None if
    there are none.

    Raises:
        CheckpointError: when files are missing or damaged.
    """
    index = folder.parent / BESIDE / SHARDED
    if not index.is_file():
        return None
    with malformed_as_error(f"{index}: not an index of an optimizer's files"):
        shards = sorted({str(Path(name).name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    if missing := [name for name in (*shards, GROUPS) if not (index.parent / name).is_file()]:
        raise CheckpointError(f"{index.parent}: {missing[0]} is missing", hint="was it copied whole?")
    parts = [load_torch_archive(index.parent / name) for name in shards]
    weights = {name: one for _, file in sorted(files.items()) for name, one in file.items()}
    with malformed_as_error(f"{index}: names files that are none of an optimizer"):
        optimizer = {
            "state": {key: one for part in parts for key, one in part.items()},
            "param_groups": load_torch_archive(index.parent / GROUPS),
        }
    return attach_moments(index, weights, optimizer)


def _distinct_names(weights: Mapping[str, StoredTensor]) -> list[str]:
    """Return the names without aliases of the same tensor, such as a tied output layer."""
    found: dict[object, str] = {}
    for name, one in weights.items():
        found.setdefault((one.path, one.begin, one.start, one.shape), name)
    return list(found.values())
