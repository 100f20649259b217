"""Contents of a Megatron folder in any format; canonical tensors and optimizer state read from them.

    optimizer.state.{exp_avg,exp_avg_sq}.<weight>     Adam moments
    optimizer.state.{fp32_param,param}.<weight>       main weights of the 16-bit optimizer and the distributed one

Optimizer state is read from `torch_dist` folders, where the tensors have the shapes of the weights: with plain
optimizers, and with the distributed one if saved with `--dist-ckpt-optim-fully-reshardable`. Sources: Megatron-Core,
optimizer/{optimizer,distrib_optimizer}.py and dist_checkpointing/optimizer.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import abbreviate_name_list
from mega_ckpt.formats.dcp import StoredTensorSlice
from mega_ckpt.formats.megatron_names import MegatronTensorMapping
from mega_ckpt.formats.torch_archive import StoredTensor
from mega_ckpt.manifest import is_exact_tiling
from mega_ckpt.tensor_pieces import (
    TensorBox,
    TensorPiece,
    TensorShape,
    compute_slice_overlap,
    copy_overlap,
    crop_tensor,
)
from mega_ckpt.weight_source import LOW, MOMENTS, ConvertedTrainingState, OptimizerNotConverted, make_trainer_state
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig


@dataclass
class MegatronTensor:
    """Dtype and shape of a tensor of a Megatron checkpoint, with the rectangular slices of it that are stored."""

    dtype: torch.dtype
    shape: TensorShape
    stored_boxes: list[StoredTensorSlice] = field(default_factory=list)


@dataclass(frozen=True)
class MegatronOptimizerState:
    """Optimizer state in a Megatron checkpoint folder.

    Attributes:
        kinds: its tensors by kind (`exp_avg` and so on) and name of the weight.
        read_objects: returns the state that is not tensors, in Megatron's containers.
        unreadable_reason: reason why the state can be read only in the original layout of ranks; else empty.
    """

    kinds: Mapping[str, Mapping[str, MegatronTensor]] = field(default_factory=dict)
    read_objects: Callable[[], Any] = list
    unreadable_reason: str = ""


@dataclass(frozen=True)
class MegatronContents:
    """Contents of a Megatron checkpoint folder of either format (`torch_dist` or `torch`).

    Attributes:
        kind: `torch_dist` or `torch`.
        args: Megatron's settings; empty if there are none.
        iteration: number of steps, if stored.
        count: number of tensors.
        tensors: returns the tensors by the names of a model's parts; other tensors have their own names.
        scheduled_samples: number of samples of the learning rate schedule, if stored.
        optimizer: the optimizer state.
    """

    kind: str
    args: Mapping[str, Any]
    iteration: int | None
    count: int
    tensors: Callable[[Sequence[MegatronTensorMapping]], Mapping[str, MegatronTensor]]
    scheduled_samples: int | None = None
    optimizer: MegatronOptimizerState = MegatronOptimizerState()


class MegatronTensorReader:
    """Reader of canonical tensors from the tensors of a Megatron checkpoint.
    The names of `tensors` must be exactly those that the list `parts` (the model's tensors in Megatron) names.

    Raises:
        CheckpointError: naming a missing, unknown or incomplete tensor, and the folder.
    """

    def __init__(
        self, parts: Sequence[MegatronTensorMapping], tensors: Mapping[str, MegatronTensor], folder: Path
    ) -> None:
        self._locations = _locate_tensors(parts, tensors, folder)

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical tensor names, in the order of the model's Megatron tensors (`parts`)."""
        return list(self._locations)

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global shape of a canonical tensor."""
        _, piece = self._locations[name][0]
        return piece.global_shape

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a canonical tensor."""
        stored, _ = self._locations[name][0]
        return stored.dtype

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` from a Megatron checkpoint.
        The result is a view of the file if the slice is stored contiguously in one chunk, else assembled.
        """
        found = [
            (target, stored, local)
            for tensor, piece in self._locations[name]
            if (target := compute_slice_overlap(offset, shape, piece.global_offset, piece.shape))
            for local in [_translate(target[0], piece.local_start, piece.global_offset)]
            for stored in tensor.stored_boxes
            if compute_slice_overlap(local, target[1], stored.offset, stored.shape)
        ]
        if len(found) == 1:
            (start, extent), stored, local = found[0]
            inside = _translate(local, (0,) * len(local), stored.offset)
            return crop_tensor(stored.read(), inside, extent)
        out = torch.empty(shape, dtype=self.tensor_dtype(name))
        for (start, extent), stored, local in found:
            inner = crop_tensor(out, _translate(start, (0,) * len(start), offset), extent)
            copy_overlap(TensorBox(local, inner), TensorBox(stored.offset, stored.read()))
        return out


def _locate_tensors(
    parts: Sequence[MegatronTensorMapping], tensors: Mapping[str, MegatronTensor], folder: Path
) -> Mapping[str, list[tuple[MegatronTensor, TensorPiece]]]:
    """Return the location of each canonical tensor, after checking that `tensors` are exactly those of the model."""
    missing = {part.name for part in parts} - tensors.keys()
    if missing:
        raise CheckpointError(
            f"{folder}: the tensor {abbreviate_name_list(missing)}, which its settings (args) require, is missing"
        )
    unknown = tensors.keys() - {part.name for part in parts}
    if unknown:
        raise CheckpointError(
            f"{folder}: the tensor {abbreviate_name_list(unknown)} is not part of a model with its settings (args)",
            hint="unknown tensors are never dropped: correct the settings with --config model.yaml",
        )
    out = defaultdict(list)
    for part in parts:
        held = tensors[part.name]
        fits = (
            held.shape[1:] == part.shape[1:] and held.shape[0] >= part.shape[0]
            if part.has_vocabulary_rows
            else held.shape == part.shape
        )
        if not fits:
            raise CheckpointError(
                f"{folder}: {part.name} has shape {list(held.shape)}, but its settings (args) require {list(part.shape)}"
            )
        if not is_exact_tiling(held.shape, ((one.offset, one.shape) for one in held.stored_boxes)):
            raise CheckpointError(f"{folder}: the shards of {part.name} overlap or are incomplete")
        for piece in part.pieces:
            out[piece.name].append((held, piece))
    return out


def _translate(offset: TensorShape, to: TensorShape, origin: TensorShape) -> TensorShape:
    return tuple(o + t - g for o, t, g in zip(offset, to, origin, strict=True))


_MAIN = ("fp32_param", "param")


def read_megatron_optimizer_state(
    contents: MegatronContents,
    parts: Sequence[MegatronTensorMapping],
    folder: Path,
    model: ModelConfig,
    dtype: torch.dtype,
) -> ConvertedTrainingState:
    """Return the Adam state in the contents of a Megatron checkpoint; OptimizerNotConverted if it has none or another's.
    The state is for weights of type `dtype`; `parts` are the model's tensors in Megatron.

    Raises:
        OptimizerNotConverted: when there is no optimizer state, or it cannot be converted.
        CheckpointError: when a tensor of it is damaged.
    """
    kinds, trained = dict(contents.optimizer.kinds), [part for part in parts if not part.name.endswith("expert_bias")]
    if not kinds:
        raise OptimizerNotConverted(contents.optimizer.unreadable_reason or "the checkpoint has no optimizer state")
    main = next((kinds.pop(kind) for kind in _MAIN if kind in kinds), None)
    if kinds.keys() != {*MOMENTS}:
        raise OptimizerNotConverted(f"the optimizer is not Adam: its state is {', '.join(sorted(kinds))}")
    if dtype in LOW:
        kinds["main"] = main or {}
    for kind, held in kinds.items():
        if missing := {part.name for part in trained} - held.keys():
            raise OptimizerNotConverted(f"the optimizer state has no {kind} of {abbreviate_name_list(missing)}")
    objects = _read_objects(contents)
    counts = (contents.args.get("consumed_train_samples"), contents.scheduled_samples)
    samples = [count for count in counts if isinstance(count, int)]
    updates = _find_numbers(objects, "common_step", "step")
    if contents.iteration is None or not samples or len(updates) != 1:
        raise OptimizerNotConverted("the numbers of steps and samples are missing in the checkpoint")
    scale, growth = _find_numbers(objects, "scale"), _find_numbers(objects, "growth_tracker")
    loss_scale = [scale.pop(), int(growth.pop())] if dtype == torch.float16 and scale and growth else None
    state = make_trainer_state(model, samples=samples[0], updates=int(updates.pop()), loss_scale=loss_scale)
    return ConvertedTrainingState(
        contents.iteration, state, {kind: MegatronTensorReader(trained, held, folder) for kind, held in kinds.items()}
    )


def _read_objects(contents: MegatronContents) -> Any:
    try:
        return contents.optimizer.read_objects()
    except CheckpointError as error:
        raise OptimizerNotConverted(error.message) from None


def _find_numbers(objects: Any, *names: str) -> set[float]:
    """Return the numbers stored under one of the names, at any depth."""
    left, visited, out = [objects], set[int](), set[float]()
    while left:
        value = left.pop()
        if id(value) in visited or not isinstance(value, Mapping | list | tuple):
            continue
        visited.add(id(value))
        pairs = list(value.items()) if isinstance(value, Mapping) else [("", inner) for inner in value]
        left += [inner for _, inner in pairs]
        for inner in (inner for name, inner in pairs if name in names):
            if isinstance(inner, StoredTensor) and math.prod(inner.shape) == 1:
                out.add(float(inner.read().item()))
            elif isinstance(inner, int | float):
                out.add(float(inner))
    return out
