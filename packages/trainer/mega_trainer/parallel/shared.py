"""What data-parallel ranks share of a stage, whichever way: what the optimizer and the training step see of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mega_ckpt.pieces import Piece, Sharded, share_of
from mega_common.errors import ConfigError
from mega_trainer.comm import Group
from mega_trainer.parallel.buckets import Bucket
from mega_trainer.parallel.param import ParamInfo, info_of, is_matrix, trains

LrFactor = Callable[[str], float]  # of a tensor, by its canonical name
EMBEDDING_AND_OUTPUT = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


@dataclass(frozen=True)
class Kind:
    """What parameters that are treated alike have in common.

    Attributes:
        data, grad_sync, replicas, parts: as in `ParamInfo`.
        decay: whether weight decay applies: to matrices, not to biases and norms.
        apart: whether an optimizer beside AdamW is for them.
        dtype: that they are computed with.
        decoupled: whether they have a learning rate of their own: the input embedding and the output layer.
        lr_factor: on their learning rate.
    """

    data: Group
    grad_sync: tuple[Group, ...]
    replicas: tuple[Group, ...]
    decay: bool
    apart: bool
    dtype: torch.dtype
    parts: Group | None = None
    decoupled: bool = False
    lr_factor: float = 1.0

    @property
    def counts_here(self) -> bool:
        """Whether this rank is the one, of those that hold copies, whose part counts in a norm over the model."""
        return all(group.rank == 0 for group in self.replicas)


def copies(described: Kind | ParamInfo, *, sharded: bool) -> tuple[Group, ...]:
    """The groups over whose ranks, in all combinations, the same values lie as here, with slices over data ranks or not."""
    groups = (*described.replicas, *described.grad_sync, *(() if sharded else (described.data,)))
    return tuple(dict.fromkeys(groups))


def share_of_copies(tensors: Mapping[str, Sharded], groups: Sequence[Group]) -> dict[str, Sharded]:
    """What this rank, of all that hold the same tensors, brings to a checkpoint."""
    rank, size = 0, 1
    for group in groups:
        rank, size = rank * group.size + group.rank, size * group.size
    return share_of(tensors, rank, size)


def by_kind(
    model: nn.Module,
    dtype: torch.dtype,
    apart: Callable[[nn.Parameter], bool] | None = None,
    *,
    decoupled: bool = False,
    lr_factor: LrFactor = lambda name: 1.0,
) -> dict[Kind, list[nn.Parameter]]:
    """The parameters of a model (or of one pipeline stage), which computes with `dtype`, sorted.

    Frozen ones are of no kind. With `decoupled` the input embedding and the output layer are kinds of their own, and those of
    each `lr_factor` are.

    Raises:
        ConfigError: when tensors that lie in one parameter have several factors.
    """
    kinds: dict[Kind, list[nn.Parameter]] = {}
    for parameter in filter(trains, model.parameters()):
        info = info_of(parameter)
        special = apart is not None and apart(parameter)
        own_lr = decoupled and any(piece.name in EMBEDDING_AND_OUTPUT for piece in info.pieces)
        kind = Kind(
            info.data, info.grad_sync, info.replicas, is_matrix(parameter), special, dtype, info.parts, own_lr,
            _factor_of(info, lr_factor),
        )  # fmt: skip
        kinds.setdefault(kind, []).append(parameter)
    return kinds


def _factor_of(info: ParamInfo, lr_factor: LrFactor) -> float:
    factors = {lr_factor(piece.name): piece.name for piece in info.pieces} or {1.0: ""}
    if len(factors) > 1:
        names = list(factors.values())
        raise ConfigError(
            f"{names[0]} and {names[1]} have different optimizer.lr_factors, and the two are one matrix in memory",
            hint="give both the same",
        )
    return next(iter(factors))


@dataclass(frozen=True)
class Part:
    """Elements of a parameter that lie in a shard.

    Attributes:
        pieces, shape: of the local tensor they are from.
        start: the first of them, in that tensor flattened.
        place: where they lie in the shard's tensors.
    """

    pieces: Sequence[Piece]
    shape: tuple[int, ...]
    start: int
    place: slice


@dataclass(eq=False)
class Shard:
    """What this rank updates and saves of some parameters.

    Attributes:
        weights: flat, a view of what the model computes with, or gathers it from.
        grads: the sum of their gradients over the data ranks, as long, fp32 or fp64.
        parts: what they are.
        bucket: what they are a slice of, in a flat buffer.
    """

    weights: Tensor
    grads: Tensor
    parts: list[Part]
    bucket: Bucket | None = None


class Buffer:
    """Parameters that are treated alike.

    Attributes:
        kind: how.
        sharded: each data rank has other shards, not the same.
        shards: as many on every data rank.
    """

    kind: Kind
    sharded: bool
    shards: list[Shard]


class SharedStage(Protocol):
    """A stage's weights and gradients, as its data ranks share them."""

    @property
    def buffers(self) -> Sequence[Buffer]:
        """Every parameter is in one."""

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""

    def backward(self, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch's backward through the stage; `last` of the step or not."""

    def finish(self) -> None:
        """End of the step's backwards: wait for the sums, and sum over the further groups that share gradients."""

    def publish(self) -> None:
        """After an update of the shards' weights: start to give every rank what it needs of them."""

    def settle(self) -> None:
        """Bring weights to rest: before anything but a forward reads or writes them."""
