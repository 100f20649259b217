"""What a folder of Megatron's holds, whatever its format: tensors in rectangles, settings, an iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mega_ckpt.formats.dcp import Stored
from mega_ckpt.formats.megatron_names import Part
from mega_ckpt.pieces import Shape


@dataclass
class Held:
    """A tensor of Megatron's (a `Part`), as far as the folder has it."""

    dtype: torch.dtype
    shape: Shape
    stored: list[Stored] = field(default_factory=list)


@dataclass(frozen=True)
class OptimizerHeld:
    """What a folder has of an optimizer.

    Attributes:
        kinds: its tensors by kind (`exp_avg` and so on), and then by the names of the weights.
        said: gives what it has beside tensors, in containers of Megatron's making.
        bound: why it fits one layout of ranks alone, if it does.
    """

    kinds: Mapping[str, Mapping[str, Held]] = field(default_factory=dict)
    said: Callable[[], Any] = list
    bound: str = ""


@dataclass(frozen=True)
class Contents:
    """What a folder of either format holds.

    Attributes:
        kind: `torch_dist` or `torch`.
        args: Megatron's settings; empty where it has none.
        iteration: steps done, if it says so.
        count: number of tensors there.
        tensors: gives them by the names of a model's parts, and those that are none of them by their own.
        scheduled: samples that the learning rate's schedule has counted, if it says so.
        optimizer: what it has of one.
    """

    kind: str
    args: Mapping[str, Any]
    iteration: int | None
    count: int
    tensors: Callable[[Sequence[Part]], Mapping[str, Held]]
    scheduled: int | None = None
    optimizer: OptimizerHeld = OptimizerHeld()


def overlap(offset: Shape, shape: Shape, other: Shape, extent: Shape) -> tuple[Shape, Shape] | None:
    """What two boxes share, as (offset, shape)."""
    begin = tuple(map(max, offset, other))
    end = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, other, extent, strict=True))
    return (begin, tuple(e - b for b, e in zip(begin, end, strict=True))) if all(map(int.__lt__, begin, end)) else None
