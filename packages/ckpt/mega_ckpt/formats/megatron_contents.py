"""Contents of a Megatron folder in any format, and canonical tensors read from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import abbreviate_names
from mega_ckpt.formats.dcp import StoredBox
from mega_ckpt.formats.megatron_names import MegatronPart
from mega_ckpt.manifest import is_exact_tiling
from mega_ckpt.tensor_pieces import TensorBox, TensorPiece, TensorShape, copy_overlap, crop_tensor
from mega_common.errors import CheckpointError


@dataclass
class MegatronTensor:
    """A tensor of Megatron's (a `MegatronPart`), with the boxes that the folder has of it."""

    dtype: torch.dtype
    shape: TensorShape
    stored_boxes: list[StoredBox] = field(default_factory=list)


@dataclass(frozen=True)
class MegatronOptimizer:
    """Optimizer state in a Megatron folder.

    Attributes:
        kinds: its tensors by kind (`exp_avg` and so on), and then by the names of the weights.
        read_objects: gives what it has beside tensors, in containers of Megatron's making.
        unreadable_reason: why it fits one layout of ranks alone, if it does.
    """

    kinds: Mapping[str, Mapping[str, MegatronTensor]] = field(default_factory=dict)
    read_objects: Callable[[], Any] = list
    unreadable_reason: str = ""


@dataclass(frozen=True)
class MegatronContents:
    """Contents of a Megatron folder of either format.

    Attributes:
        kind: `torch_dist` or `torch`.
        args: Megatron's settings; empty where it has none.
        iteration: steps done, if it says so.
        count: number of tensors there.
        tensors: gives them by the names of a model's parts, and those that are none of them by their own.
        scheduled_samples: samples that the learning rate's schedule has counted, if it says so.
        optimizer: what it has of one.
    """

    kind: str
    args: Mapping[str, Any]
    iteration: int | None
    count: int
    tensors: Callable[[Sequence[MegatronPart]], Mapping[str, MegatronTensor]]
    scheduled_samples: int | None = None
    optimizer: MegatronOptimizer = MegatronOptimizer()


def box_overlap(
    offset: TensorShape, shape: TensorShape, other: TensorShape, extent: TensorShape
) -> tuple[TensorShape, TensorShape] | None:
    """Return the overlap of two boxes, as (offset, shape)."""
    begin = tuple(map(max, offset, other))
    end = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, other, extent, strict=True))
    return (begin, tuple(e - b for b, e in zip(begin, end, strict=True))) if all(map(int.__lt__, begin, end)) else None


class MegatronTensorReader:
    """Reader of canonical tensors in `tensors`, which must be exactly those of `parts`.

    Raises:
        CheckpointError: naming the tensor and the folder, when they are not.
    """

    def __init__(self, parts: Sequence[MegatronPart], tensors: Mapping[str, MegatronTensor], folder: Path) -> None:
        self._places = _locate_tensors(parts, tensors, folder)

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical names, in the order of `parts`."""
        return list(self._places)

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global shape of a tensor."""
        _, piece = self._places[name][0]
        return piece.global_shape

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor."""
        held, _ = self._places[name][0]
        return held.dtype

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read a rectangle of a tensor: a view of the file if it is stored in one piece, else assembled."""
        found = [
            (target, stored, place)
            for held, piece in self._places[name]
            if (target := box_overlap(offset, shape, piece.global_offset, piece.shape))
            for place in [_translate(target[0], piece.local_start, piece.global_offset)]
            for stored in held.stored_boxes
            if box_overlap(place, target[1], stored.offset, stored.shape)
        ]
        if len(found) == 1:
            (start, extent), stored, place = found[0]
            inside = _translate(place, (0,) * len(place), stored.offset)
            return crop_tensor(stored.read(), inside, extent)
        out = torch.empty(shape, dtype=self.tensor_dtype(name))
        for (start, extent), stored, place in found:
            inner = crop_tensor(out, _translate(start, (0,) * len(start), offset), extent)
            copy_overlap(TensorBox(place, inner), TensorBox(stored.offset, stored.read()))
        return out


def _locate_tensors(
    parts: Sequence[MegatronPart], tensors: Mapping[str, MegatronTensor], folder: Path
) -> Mapping[str, list[tuple[MegatronTensor, TensorPiece]]]:
    """Return the location of each canonical tensor, after checking that `tensors` are exactly those of the model."""
    missing = {part.name for part in parts} - tensors.keys()
    if missing:
        raise CheckpointError(f"{folder}: there is no tensor {abbreviate_names(missing)}, which its settings ask for")
    unknown = tensors.keys() - {part.name for part in parts}
    if unknown:
        raise CheckpointError(
            f"{folder}: the tensor {abbreviate_names(unknown)} is not one of a model with its settings",
            hint="a tensor that is not understood is refused rather than dropped",
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
                f"{folder}: {part.name} has shape {list(held.shape)}, but the settings make it {list(part.shape)}"
            )
        if not is_exact_tiling(held.shape, ((one.offset, one.shape) for one in held.stored_boxes)):
            raise CheckpointError(f"{folder}: the shards of {part.name} overlap or leave a part out")
        for piece in part.pieces:
            out[piece.name].append((held, piece))
    return out


def _translate(offset: TensorShape, to: TensorShape, origin: TensorShape) -> TensorShape:
    return tuple(o + t - g for o, t, g in zip(offset, to, origin, strict=True))
