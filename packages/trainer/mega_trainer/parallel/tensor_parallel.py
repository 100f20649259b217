"""Tensor and sequence parallelism (arXiv:1909.08053, arXiv:2205.05198).

Legend: B batch, S sequence, D model width, N width of a split layer, T tensor-parallel ranks.

    column   X [B, S, D]    W [N/T, D]   Y = X W^T  [B, S, N/T]   every rank has all of X; the backward all-reduces dX
    row      X [B, S, N/T]  W [D, N/T]   Y = sum_T X W^T  [B, S, D]   the forward all-reduces Y

With sequence parallelism the tensors outside a column-row pair are [B, S/T, D]: the all-reduce of a row layer becomes a
reduce-scatter over S, and a column layer first all-gathers S; the traffic is the same, the memory T times smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.distributed.comm import CommGroup, all_gather, all_reduce, reduce_scatter
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.kernels import gemm_accumulation
from mega_trainer.kernels.kernel_interface import Kernels
from mega_trainer.parallel.lora_layers import LoraAdapterLayer, PerRowAdapters
from mega_trainer.parallel.parallel_linear import SEQUENCE, DeferredWgradQueue, ParallelLinearFunction
from mega_trainer.parallel.parameter_info import get_main_grad_function, make_parameter


class _SumForward(Function):
    """Sum of X over the ranks: all-reduce, with the identity as backward, or with `sp` reduce-scatter and all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup, sp: bool) -> Tensor:
        ctx.group, ctx.sp = group, sp
        if sp:
            return reduce_scatter(x, group, SEQUENCE)
        y = x.contiguous().clone()
        all_reduce(y, group)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return (all_gather(dy, ctx.group, SEQUENCE) if ctx.sp else dy), None, None


class _GatherSequence(Function):
    """All-gather [B, S/T, D] -> [B, S, D]; the backward reduce-scatters the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group, SEQUENCE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(dy, ctx.group, SEQUENCE), None


class _SumBackward(Function):
    """Identity whose backward all-reduces the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dx = dy.contiguous().clone()
        all_reduce(dx, ctx.group)
        return dx, None


def sum_partial_results(x: Tensor, group: CommGroup, *, sp: bool) -> Tensor:
    """Sum x [B, S, D] over T tensor ranks, all-reduced or with `sp` reduce-scattered to this rank's [B, S/T, D]."""
    return x if group.size == 1 else _SumForward.apply(x, group, sp)  # type: ignore[no-untyped-call]


def gather_from_sequence_parallel_region(x: Tensor, group: CommGroup, *, sp: bool) -> Tensor:
    """Gather x [B, S/T, D] of T tensor ranks to [B, S, D] if `sp`, else return x; the backward sums all ranks' gradients."""
    if group.size == 1 or not sp:
        return sum_input_gradient(x, group)
    y: Tensor = _GatherSequence.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def sum_input_gradient(x: Tensor, group: CommGroup) -> Tensor:
    """Return x unchanged; the backward sums its gradient over the ranks of `group`."""
    return x if group.size == 1 else _SumBackward.apply(x, group)  # type: ignore[no-untyped-call]


def local_sequence_slice(length: int, group: CommGroup, *, sp: bool) -> slice:
    """Return the slice of a sequence of `length` tokens in this rank's residual stream: its share if `sp`, or all."""
    share = length // group.size
    return slice(group.rank * share, (group.rank + 1) * share) if sp else slice(None)


class ColumnParallelLinear(nn.Module):
    """Column-parallel linear layer Y = X W^T + b: the rows of W, and so the columns of Y, are split over `group`.

    Args:
        kernels: back end of the GEMMs.
        weights: local parameters [N_i/T, D], used as one matrix. Usually one; parts whose gradients are summed over
            different ranks (shared key/value heads) are separate parameters.
        biases: local parameters [N_i/T] for the same parts, or none.
        group: tensor-parallel ranks.
        sp: X is [B, S/T, D] rather than [B, S, D].
        deferred: queue for wgrad GEMMs, if the pipeline splits backwards.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Sequence[nn.Parameter],
        biases: Sequence[nn.Parameter],
        group: CommGroup,
        *,
        sp: bool,
        deferred: DeferredWgradQueue | None = None,
    ) -> None:
        super().__init__()
        self.linear = ParallelLinearFunction(kernels, deferred, group, sp)
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)
        self.adapter: LoraAdapterLayer | PerRowAdapters | None = None

    def forward(self, x: Tensor, dropout: SeededDropout | None = None) -> Tensor:
        """Map an input to this rank's columns of the linear layer's output Y, [B, S, N/T].
        The input is [B, S or S/T, D] (S/T under sequence parallelism over T ranks); `dropout` is for the LoRA adapter.
        """
        weight, bias = concat_parameters(self.weights), concat_parameters(self.biases)
        assert weight is not None
        y = self.linear(x, weight, bias)
        return y if self.adapter is None else self.adapter(x, y, weight, bias, dropout)


def concat_parameters(parts: nn.ParameterList) -> Tensor | None:
    """Return parameters [N_i, ..] concatenated to one tensor [N, ..], or None if there are none."""
    # indexing a ParameterList takes several times as long
    values: list[Tensor] = [value for value in parts._parameters.values() if value is not None]
    if len(values) < 2:
        return values[0] if values else None
    return torch.cat(values)


class RowParallelLinear(nn.Module):
    """Row-parallel linear layer: columns of W and X split over `group`, results summed, bias added after the sum.

    Args as for `ColumnParallelLinear`; the local weight is [D, N/T], and the bias [D] is whole on every rank.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: CommGroup,
        *,
        sp: bool,
        deferred: DeferredWgradQueue | None = None,
    ) -> None:
        super().__init__()
        self.linear, self.group, self.sp = ParallelLinearFunction(kernels, deferred), group, sp
        self.weight, self.bias = weight, bias
        self.adapter: LoraAdapterLayer | PerRowAdapters | None = None

    def forward(self, x: Tensor, dropout: SeededDropout | None = None) -> Tensor:
        """Map this rank's columns of X, [B, S, N/T], to the linear layer's output Y, summed over ranks.
        Y is [B, S or S/T, D] (S/T under sequence parallelism over T ranks); `dropout` is for the LoRA adapter.
        """
        y = self._summed_output(x)
        return y if self.adapter is None else self.adapter(x, y, self.weight, self.bias, dropout)

    def _summed_output(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return self.linear(x, self.weight, self.bias)
        y = sum_partial_results(self.linear(x, self.weight), self.group, sp=self.sp)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Token embedding with the vocabulary rows split over a tensor-parallel group.
    Each rank of `group` looks up its own rows, zeros for others, and the results are summed over ranks.

    The vocabulary is padded so that every rank holds the same number of rows; padding is in no piece.
    """

    def __init__(self, weight: nn.Parameter, group: CommGroup, *, sp: bool) -> None:
        super().__init__()
        self.weight, self.group, self.sp = weight, group, sp

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids int64 [B, S] to embeddings [B, S or, under sequence parallelism, S/T, D]."""
        return embed_token_ids(tokens, self.weight, self.group, sp=self.sp)


def embed_token_ids(tokens: Tensor, weight: Tensor, group: CommGroup, *, sp: bool) -> Tensor:
    """Map token ids int64 [B, S] to rows of an embedding matrix that a group of ranks splits by rows.
    The result is [B, S, D], or under sequence parallelism (`sp`, T ranks of `group`) this rank's slice [B, S/T, D].
    """
    if group.size == 1:
        return _lookup_rows(tokens, weight)
    rows = weight.shape[0]
    local = tokens - group.rank * rows
    mine = (local >= 0) & (local < rows)
    x = _lookup_rows(local.clamp(0, rows - 1), weight) * mine.unsqueeze(-1)
    return sum_partial_results(x, group, sp=sp)


def _lookup_rows(indices: Tensor, weight: Tensor) -> Tensor:
    if get_main_grad_function(weight) is None:
        return nn.functional.embedding(indices, weight)
    x: Tensor = _MainGradEmbedding.apply(indices, weight)  # type: ignore[no-untyped-call]
    return x


class _MainGradEmbedding(Function):
    """Embedding lookup whose gradient is added to the main gradient of the matrix."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.main = get_main_grad_function(weight)
        return nn.functional.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None]:
        (indices,) = ctx.saved_tensors
        out, add = ctx.main()
        gemm_accumulation.write_embedding_grad(dy, indices, out, add=add)
        return None, None


def vocab_rows_per_rank(vocab_size: int, group: CommGroup) -> int:
    """Return the number of vocabulary rows on each rank of a tensor split over `group`, padding included."""
    return -(-vocab_size // group.size)


def make_vocab_parameter(name: str, vocab_size: int, *tail: int, group: CommGroup, **kwargs: Any) -> nn.Parameter:
    """Return this rank's share of a parameter [vocab_size, *tail] split by rows over a group of ranks.
    All shares in `group` have an equal size; padding rows at the end are not part of the global tensor.
    """
    rows = vocab_rows_per_rank(vocab_size, group)
    first = min(group.rank * rows, vocab_size)
    own = min(rows, vocab_size - first)
    zeros = (0,) * len(tail)
    pieces = [TensorPiece(name, (vocab_size, *tail), (first, *zeros), (0, *zeros), (own, *tail))] if own else []
    return make_parameter((rows, *tail), pieces, **kwargs)


@dataclass(frozen=True)
class SplitHeads:
    """Name and shape of a tensor whose first axis is split by heads among tensor-parallel ranks.
    The axis of the tensor `name` is `count` heads (or rows, or groups) of `size` rows each.
    """

    name: str
    count: int
    size: int = 1


def get_fused_heads_layout(
    blocks: Sequence[SplitHeads], tail: tuple[int, ...], group: CommGroup
) -> tuple[list[int], list[TensorPiece]]:
    """Return the local shape of a parameter that fuses this tensor rank's heads of several tensors, and its pieces.
    The tensors are [count * size, *tail]; a piece has the position of heads in their global tensor.

    So the output of a fused gate-up or query-key-value GEMM has whole heads, and matching gate and up columns, on each
    rank. If there are fewer heads than ranks, consecutive ranks hold the same head.
    """
    pieces, row, zeros = [], 0, (0,) * len(tail)
    for block in blocks:
        own = max(1, block.count // group.size) * block.size
        first = group.rank * block.count // group.size * block.size
        whole = (block.count * block.size, *tail)
        pieces.append(TensorPiece(block.name, whole, (first, *zeros), (row, *zeros), (own, *tail)))
        row += own
    return [row, *tail], pieces
