"""Adam's moments as `torch.optim.Optimizer.state_dict` has them, and as Colossal-AI writes the same in several files.

    {"state": {0: {"step", "exp_avg", "exp_avg_sq"}, ...}, "param_groups": [{"params": [0, ...], ...}]}

Parameters are called by their number, in the order in which the optimizer was given them. Given all of a model's in one group,
as `model.parameters()` has them, these are the weights in the order of the model's own state. Names, where there are some, are
in `param_names` of the groups, or stand for the numbers (`FSDP.optim_state_dict`).

    modeling/     pytorch_model.bin, or pytorch_model.bin.index.json and its shards
    optimizer/    pytorch_optim.bin.index.json, pytorch_optim_group.bin (`param_groups`), pytorch_optim-00001.bin (of `state`)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_ckpt.formats.dcp import failing
from mega_ckpt.formats.disk import Stored
from mega_ckpt.formats.named_state import NamedState, number, plain
from mega_ckpt.formats.torch_archive import StoredTensor, load_archive
from mega_ckpt.training import MOMENTS
from mega_common.errors import CheckpointError

SHARDED, GROUPS = "pytorch_optim.bin.index.json", "pytorch_optim_group.bin"
BESIDE = "optimizer"  # Colossal-AI's folder of the optimizer's state, beside that of the weights
BY_NUMBER = "the moments are kept by the number of a parameter"


def with_moments(path: Path, weights: Mapping[str, StoredTensor], optimizer: Mapping[Any, Any]) -> NamedState:
    """As `numbered`, of an optimizer that was given the weights in the order of the model's state, which `weights` are in."""
    held = {name: plain(one.path, one) for name, one in weights.items()}
    return numbered(path, held, optimizer, [[_distinct(weights)]])


def numbered(
    path: Path, held: Mapping[str, Stored], optimizer: Mapping[Any, Any], orders: Sequence[Sequence[Sequence[str]]]
) -> NamedState:
    """The weights, and the moments by their names; the weights alone, and why, where it cannot be told whose they are.

    Args:
        path: the file that the moments are in, for messages.
        held: the weights of the whole model.
        optimizer: the optimizer's state.
        orders: of the names that it may have been given, by group; the first with as many in each counts.

    Raises:
        CheckpointError: when that is not laid out so.
    """
    with failing(f"{path}: not the state of an optimizer of torch"):
        groups, state = optimizer["param_groups"], optimizer["state"]
        keys = [key for group in groups for key in group["params"]]
        names = [name for group in groups for name in group.get("param_names", ())] or keys
        if not all(isinstance(name, str) for name in names):
            counts = [len(group["params"]) for group in groups]
            order = next((order for order in orders if [len(group) for group in order] == counts), None)
            if order is None:
                counted = f"{len(keys)} in {len(groups)} groups, the weights are {sum(map(len, orders[0]))}"
                return NamedState(held, lacks=f"{BY_NUMBER}, {counted}")
            names = [name for group in order for name in group]
        told = dict(zip(names, (state.get(key, {}) for key in keys), strict=True))
        if any(
            name in held and kind in one and one[kind].shape != held[name].shape
            for name, one in told.items()
            for kind in MOMENTS
        ):
            return NamedState(held, lacks=f"{BY_NUMBER}, in another order than the weights")
        moments = {
            kind: {name: plain(one[kind].path, one[kind]) for name, one in told.items() if kind in one}
            for kind in MOMENTS
        }
        steps = {number(one["step"]) for one in told.values() if "step" in one}
    return NamedState(held, moments, steps.pop() if len(steps) == 1 else None)


def beside(folder: Path, files: Mapping[str, Mapping[str, StoredTensor]]) -> NamedState | None:
    """Weights that Colossal-AI saved in `folder`, by file in their order, with the moments beside; None where there are none.

    Raises:
        CheckpointError: when files are missing or damaged.
    """
    index = folder.parent / BESIDE / SHARDED
    if not index.is_file():
        return None
    with failing(f"{index}: not an index of an optimizer's files"):
        shards = sorted({str(Path(name).name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    if missing := [name for name in (*shards, GROUPS) if not (index.parent / name).is_file()]:
        raise CheckpointError(f"{index.parent}: {missing[0]} is missing", hint="was it copied whole?")
    parts = [load_archive(index.parent / name) for name in shards]
    weights = {name: one for _, file in sorted(files.items()) for name, one in file.items()}
    with failing(f"{index}: names files that are none of an optimizer"):
        optimizer = {
            "state": {key: one for part in parts for key, one in part.items()},
            "param_groups": load_archive(index.parent / GROUPS),
        }
    return with_moments(index, weights, optimizer)


def _distinct(weights: Mapping[str, StoredTensor]) -> list[str]:
    """Their names, but those of tensors that have another name already, as the ends of a tied model have."""
    found: dict[object, str] = {}
    for name, one in weights.items():
        found.setdefault((one.path, one.begin, one.start, one.shape), name)
    return list(found.values())
