"""A parameter's description of itself: where its elements live, how it starts, over whom its gradient is summed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mega_ckpt.pieces import Piece
from mega_trainer.comm import Group


@dataclass(frozen=True)
class ParamInfo:
    """What the rest of the trainer needs to know of a parameter.

    Attributes:
        pieces: where its elements live in the canonical tensors; padding belongs to no piece.
        std: standard deviation of the normal distribution it starts from; None for a constant `fill`.
        fill: the constant it starts from when `std` is None.
        data: the group over which the data-parallel gradient is averaged and ZeRO slices are cut.
        grad_sync: further groups whose ranks each see a part of its gradient, to be summed.
        replicas: groups whose ranks hold the same values, so that norms count it on the first rank alone.
    """

    pieces: tuple[Piece, ...]
    data: Group
    std: float | None = None
    fill: float = 0.0
    grad_sync: tuple[Group, ...] = ()
    replicas: tuple[Group, ...] = ()


def make_parameter(
    shape: Sequence[int],
    pieces: Sequence[Piece],
    *,
    data: Group,
    dtype: torch.dtype,
    device: torch.device,
    std: float | None = None,
    fill: float = 0.0,
    grad_sync: Sequence[Group] = (),
    replicas: Sequence[Group] = (),
) -> nn.Parameter:
    """A parameter of the local `shape`, not initialised, with its description attached."""
    parameter = nn.Parameter(torch.zeros(tuple(shape), dtype=dtype, device=device))
    sync = tuple(group for group in grad_sync if group.size > 1)
    copies = tuple(group for group in replicas if group.size > 1)
    parameter.mega = ParamInfo(tuple(pieces), data, std, fill, sync, copies)  # type: ignore[attr-defined]
    return parameter


def local_of(parameter: Tensor) -> Tensor:
    """This rank's elements of a parameter, as a view: all of it, or under ZeRO-3 its rows."""
    values = parameter.detach()
    return values.to_local() if isinstance(values, DTensor) else values


def info_of(parameter: Tensor) -> ParamInfo:
    """The description that `make_parameter` attached."""
    info: ParamInfo = parameter.mega  # type: ignore[attr-defined]
    return info
