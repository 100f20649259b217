"""Adam moments of other trainers, by name or by parameter number: state dicts of `torch.optim.Optimizer`, Colossal-AI's
sharded files, `optimizer.pt` of transformers' Trainer and `optimizer.bin` of Accelerate.

    {"state": {0: {"step", "exp_avg", "exp_avg_sq"}, ...}, "param_groups": [{"params": [0, ...], ...}]}

Parameters are numbered in the order in which the optimizer received them. With one group, `model.parameters()`, this is
the order of the model's state dict. Some state dicts have names: in `param_names` of the groups, or instead of numbers
(`FSDP.optim_state_dict`).

    modeling/     pytorch_model.bin, or pytorch_model.bin.index.json and its shards
    optimizer/    pytorch_optim.bin.index.json, pytorch_optim_group.bin (`param_groups`), pytorch_optim-00001.bin (of `state`)

Next to a HuggingFace model the weight files have another order, so the order of the parameters is that of the model in
transformers, which is built on the meta device. Accelerate's programs usually give the optimizer all parameters as one
group; the Trainer makes two groups, without weight decay for norms and biases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mega_ckpt.formats.dcp import convert_parse_errors
from mega_ckpt.formats.disk_source import LazyTensor
from mega_ckpt.formats.safe_pickles import PickledObjectPlaceholder
from mega_ckpt.formats.torch_archive import StoredTensor, load_torch_archive
from mega_ckpt.weight_source import MOMENTS
from mega_common.errors import CheckpointError


@dataclass(frozen=True)
class NamedAdamState:
    """Weights and Adam moments read from another trainer's folder, keyed by the names of the weights.

    Attributes:
        weights: weights by name.
        moments: moments by kind (`exp_avg`, `exp_avg_sq`) and name of the weight; empty if they are missing or cannot be
            assigned to weights.
        steps: number of updates of the moments, if stored.
        samples: number of consumed samples, if stored.
        missing_reason: reason for empty `moments`.
    """

    weights: Mapping[str, LazyTensor]
    moments: Mapping[str, Mapping[str, LazyTensor]] = field(default_factory=dict)
    steps: int | None = None
    samples: int | None = None
    missing_reason: str = "Adam moments with the names of the weights are missing"

    def rename_weights(self, name: Callable[[str], str]) -> NamedAdamState:
        """Return the state with each weight and its moments renamed by `name`."""
        moments = {kind: {name(key): one for key, one in tensors.items()} for kind, tensors in self.moments.items()}
        weights = {name(key): one for key, one in self.weights.items()}
        return replace(self, weights=weights, moments=moments)


def to_lazy_tensor(path: Path, one: StoredTensor) -> LazyTensor:
    """Return a `LazyTensor` of a tensor that `torch.save` stored unsharded in the file `path`."""
    return LazyTensor(path, one.dtype, one.shape, one.read)


def parse_integer(value: Any) -> int | None:
    """Return the integer that a number, a one-element tensor or an enumeration's value stands for, else None."""
    if isinstance(value, PickledObjectPlaceholder) and len(value.args) == 1:
        (value,) = value.args
    if isinstance(value, StoredTensor | LazyTensor):
        value = value.read().reshape(-1)[:1].sum().item()
    return int(value) if isinstance(value, int | float) else None


SHARDED, GROUPS = "pytorch_optim.bin.index.json", "pytorch_optim_group.bin"
OPTIMIZER_FOLDER = "optimizer"  # Colossal-AI's folder of the optimizer state, a sibling of that of the weights
BY_NUMBER = "the moments are stored by parameter number"


def attach_adam_moments(
    path: Path, weights: Mapping[str, StoredTensor], optimizer: Mapping[Any, Any]
) -> NamedAdamState:
    """Return `weights` with a torch optimizer's Adam moments, or with the `missing_reason` if these do not match the weights.
    The numbered parameters of the state dict, `optimizer`, are in the order of `weights`.
    """
    held = {name: to_lazy_tensor(one.path, one) for name, one in weights.items()}
    return match_adam_moments_to_names(path, held, optimizer, [[_distinct_names(weights)]])


def match_adam_moments_to_names(
    path: Path, held: Mapping[str, LazyTensor], optimizer: Mapping[Any, Any], orders: Sequence[Sequence[Sequence[str]]]
) -> NamedAdamState:
    """Return weights with a torch optimizer's Adam moments by name, or with the `missing_reason` if no order of names fits.
    The weights are `held`, the state dict is `optimizer`.

    Args:
        path: the file of the moments, for messages.
        held: the weights of the whole model.
        optimizer: the optimizer's state dict.
        orders: candidates for the order of the names, by group; the first one whose group sizes match is used.

    Raises:
        CheckpointError: when `optimizer` is not a state dict of an optimizer.
    """
    with convert_parse_errors(f"{path}: not a state dict of a torch optimizer"):
        groups, state = optimizer["param_groups"], optimizer["state"]
        keys = [key for group in groups for key in group["params"]]
        names = [name for group in groups for name in group.get("param_names", ())] or keys
        if not all(isinstance(name, str) for name in names):
            counts = [len(group["params"]) for group in groups]
            order = next((order for order in orders if [len(group) for group in order] == counts), None)
            if order is None:
                counted = f"of {len(keys)} parameters in {len(groups)} groups, but there are {sum(map(len, orders[0]))} weights"
                return NamedAdamState(held, missing_reason=f"{BY_NUMBER}, {counted}")
            names = [name for group in order for name in group]
        by_name = dict(zip(names, (state.get(key, {}) for key in keys), strict=True))
        if any(
            name in held and kind in entry and entry[kind].shape != held[name].shape
            for name, entry in by_name.items()
            for kind in MOMENTS
        ):
            return NamedAdamState(held, missing_reason=f"{BY_NUMBER}, in another order than the weights")
        moments = {
            kind: {
                name: to_lazy_tensor(entry[kind].path, entry[kind]) for name, entry in by_name.items() if kind in entry
            }
            for kind in MOMENTS
        }
        steps = {parse_integer(entry["step"]) for entry in by_name.values() if "step" in entry}
    return NamedAdamState(held, moments, steps.pop() if len(steps) == 1 else None)


def read_colossalai_state(folder: Path, files: Mapping[str, Mapping[str, StoredTensor]]) -> NamedAdamState | None:
    """Return the weights and Adam moments of a Colossal-AI checkpoint, or None if it has no moments.

    The weights are in `folder`, file by file in order; the moments are in the sibling folder `optimizer`.

    Raises:
        CheckpointError: when files are missing or damaged.
    """
    index = folder.parent / OPTIMIZER_FOLDER / SHARDED
    if not index.is_file():
        return None
    with convert_parse_errors(f"{index}: not an index of optimizer files"):
        shards = sorted({str(Path(name).name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    if missing := [name for name in (*shards, GROUPS) if not (index.parent / name).is_file()]:
        raise CheckpointError(f"{index.parent}: {missing[0]} is missing", hint="copy the folder again")
    parts = [load_torch_archive(index.parent / name) for name in shards]
    weights = {name: one for _, file in sorted(files.items()) for name, one in file.items()}
    with convert_parse_errors(f"{index}: its files have no optimizer state"):
        optimizer = {
            "state": {key: one for part in parts for key, one in part.items()},
            "param_groups": load_torch_archive(index.parent / GROUPS),
        }
    return attach_adam_moments(index, weights, optimizer)


def _distinct_names(weights: Mapping[str, StoredTensor]) -> list[str]:
    """Return the names without aliases of the same tensor, such as a tied output layer."""
    found: dict[object, str] = {}
    for name, one in weights.items():
        found.setdefault((one.path, one.begin, one.start, one.shape), name)
    return list(found.values())


FILES = ("optimizer.pt", "optimizer.bin")
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.|_)norm(\.|$)")


def read_hf_adam_state(folder: Path, weights: Mapping[str, LazyTensor]) -> NamedAdamState | None:
    """Return `weights` with the Adam moments that transformers or Accelerate saved in `folder`, None if neither did.

    The moments are in optimizer.pt (transformers) or optimizer.bin (Accelerate). An unreadable optimizer file is not an
    error, since the weights are in other files: the result has the reason.
    """
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        return None
    try:
        orders = _parameter_orders(folder)
    except ImportError:
        reason = f"{BY_NUMBER}, and transformers, which defines the order of the parameters, is not installed"
        return NamedAdamState(weights, missing_reason=reason)
    except Exception as error:  # noqa: BLE001  # code of any model in transformers may raise any exception
        return NamedAdamState(weights, missing_reason=f"{BY_NUMBER}, and transformers cannot build the model ({error})")
    try:
        optimizer = load_torch_archive(path)
        if not isinstance(optimizer, Mapping):
            raise CheckpointError(f"{path}: not a state dict of a torch optimizer")
        return match_adam_moments_to_names(path, weights, optimizer, orders)
    except CheckpointError as error:
        return NamedAdamState(weights, missing_reason=error.message)


def _parameter_orders(folder: Path) -> list[list[list[str]]]:
    """Return the possible parameter orders of the optimizer: parameter names by group."""
    import transformers  # takes seconds, and only this function needs it

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model_class = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            model: nn.Module = model_class(config)
        else:
            auto = transformers.AutoModelForCausalLM
            model = auto.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}
    names = [name for name, _ in model.named_parameters()]
    decayed = [name for name in names if not _UNDECAYED.search(name.lower()) and name.rpartition(".")[0] not in norms]
    return [[names], [decayed, [name for name in names if name not in set(decayed)]]]
