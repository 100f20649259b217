"""Parameter groups and shards of a stage, in the form the optimizer and the training step use at every ZeRO level."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mega_ckpt.tensor_pieces import ShardedTensor, TensorPiece, select_replica_share
from mega_common.errors import ConfigError
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.parallel.parameter_info import ParameterInfo, get_parameter_info, is_trainable, is_weight_matrix

LrFactor = Callable[[str], float]  # canonical tensor name -> learning-rate factor
EMBEDDING_AND_OUTPUT = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


@dataclass(frozen=True)
class ParamGroupKey:
    """Key of a param group: the attributes that all of its parameters share.
    Examples are weight decay, dtype and reduction groups.

    Attributes:
        data, grad_sync, replicas, parts: as in `ParameterInfo`.
        decay: weight decay applies: to matrices, not to biases and norms.
        separate: another optimizer than AdamW updates them.
        dtype: compute dtype.
        decoupled: the decoupled learning rate applies: to the input embedding and the output layer.
        lr_factor: factor on the learning rate.
    """

    data: CommGroup
    grad_sync: tuple[CommGroup, ...]
    replicas: tuple[CommGroup, ...]
    decay: bool
    separate: bool
    dtype: torch.dtype
    parts: CommGroup | None = None
    decoupled: bool = False
    lr_factor: float = 1.0

    @property
    def counts_in_norms(self) -> bool:
        """True on the first of the ranks that replicate the parameters, which alone counts them in a norm."""
        return all(group.rank == 0 for group in self.replicas)


def replica_groups(group: ParamGroupKey | ParameterInfo, *, sharded: bool) -> tuple[CommGroup, ...]:
    """Return the groups whose ranks replicate a parameter, without the data group if it shards state (`sharded`)."""
    groups = (*group.replicas, *group.grad_sync, *(() if sharded else (group.data,)))
    return tuple(dict.fromkeys(groups))


def split_replicated_tensors_to_save(
    tensors: Mapping[str, ShardedTensor], groups: Sequence[CommGroup]
) -> dict[str, ShardedTensor]:
    """Return the share of each replicated tensor that this rank saves to a checkpoint.
    The ranks of `groups` split the work.
    """
    rank, size = 0, 1
    for group in groups:
        rank, size = rank * group.size + group.rank, size * group.size
    return select_replica_share(tensors, rank, size)


def make_param_groups(
    model: nn.Module,
    dtype: torch.dtype,
    separate: Callable[[nn.Parameter], bool] | None = None,
    *,
    decoupled: bool = False,
    lr_factor: LrFactor = lambda name: 1.0,
) -> dict[ParamGroupKey, list[nn.Parameter]]:
    """Return the trainable parameters of a model or a pipeline stage by param group.

    Args:
        dtype: compute dtype of the model.
        separate: selects parameters for another optimizer.
        decoupled: the input embedding and the output layer have separate groups.
        lr_factor: learning-rate factor of each tensor; each factor has a separate group.

    Raises:
        ConfigError: when tensors fused in one parameter have different factors.
    """
    kinds: dict[ParamGroupKey, list[nn.Parameter]] = {}
    for parameter in filter(is_trainable, model.parameters()):
        info = get_parameter_info(parameter)
        special = separate is not None and separate(parameter)
        own_lr = decoupled and any(piece.name in EMBEDDING_AND_OUTPUT for piece in info.gathered_pieces)
        kind = ParamGroupKey(
            info.data, info.grad_sync, info.replicas, is_weight_matrix(parameter), special, dtype, info.parts, own_lr,
            _common_lr_factor(info, lr_factor),
        )  # fmt: skip
        kinds.setdefault(kind, []).append(parameter)
    return kinds


def _common_lr_factor(info: ParameterInfo, lr_factor: LrFactor) -> float:
    factors = {lr_factor(piece.name): piece.name for piece in info.gathered_pieces} or {1.0: ""}
    if len(factors) > 1:
        names = list(factors.values())
        raise ConfigError(
            f"optimizer.lr_factors must be equal for {names[0]} and {names[1]}, which are fused into one matrix",
            hint="set the same factor for both",
        )
    return next(iter(factors))


@dataclass(frozen=True)
class ParameterShardPart:
    """Range of a `ParameterShard` that belongs to one parameter, and its place in both.

    Attributes:
        pieces, shape: pieces and shape of the local tensor.
        start: first element, in the flattened local tensor.
        shard_slice: position in the shard's tensors.
    """

    pieces: Sequence[TensorPiece]
    shape: tuple[int, ...]
    start: int
    shard_slice: slice


@dataclass(frozen=True)
class GatheredShardLayout:
    """Layout of the shards that all data ranks hold of one bucket or ZeRO-3 parameter, one after another.

    Attributes:
        rank_elements: elements of each rank's part, of which the last ranks' shards may use fewer.
        param_slices: slice of each parameter in the joined parts.
    """

    rank_elements: int
    param_slices: Mapping[nn.Parameter, slice]


@dataclass(eq=False)
class ParameterShard:
    """Flat range of parameter elements that this rank updates and saves.

    Attributes:
        weights: flat view of the weights that the model computes with or, under ZeRO-3, gathers.
        grads: gradients summed over the data ranks, of the same length, fp32 or fp64.
        parts: parameters of the elements.
        gathered: layout of all data ranks' shards together.
    """

    weights: Tensor
    grads: Tensor
    parts: list[ParameterShardPart]
    gathered: GatheredShardLayout


class ParameterBuffer:
    """Parameters of one param group, with this rank's shards of them.

    Attributes:
        kind: param group.
        sharded: each data rank has different shards.
        shards: shards of this rank; every data rank has the same number.
    """

    kind: ParamGroupKey
    sharded: bool
    shards: list[ParameterShard]


class ShardedStage(Protocol):
    """Interface of the weights and gradients of one pipeline stage, sharded over its data ranks (ZeRO)."""

    @property
    def buffers(self) -> Sequence[ParameterBuffer]:
        """Parameter buffers of the stage; every trainable parameter is in one."""

    def begin_step(self) -> None:
        """Discard the gradients of the previous step."""

    def backward_context(self, last: bool) -> AbstractContextManager[None]:
        """Accumulate the gradients of the backward that runs in the `with` block, and start reductions that are due.
        `last` marks the last backward of the step.
        """

    def finish_gradients(self) -> None:
        """Wait for the step's gradient reductions over data ranks, and sum gradients over the `grad_sync` groups."""

    def all_gather_params(self) -> None:
        """Start to send every data rank the updated weights that it needs."""

    def wait_for_params(self) -> None:
        """Wait until the updated weights have arrived; needed before any access to them other than a forward."""
