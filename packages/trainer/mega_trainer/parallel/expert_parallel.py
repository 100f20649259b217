"""Expert parallelism: dispatch of tokens to the ranks that hold their experts, and combine (arXiv:2006.16668).

Each rank has its own tokens: under sequence parallelism its part of the sequence, otherwise a share of the tokens that all
tensor ranks hold. The ranks of a stage (all data, context and tensor ranks) are cut into groups of ep x expert_tp
consecutive ranks that together hold all experts; so ep need not divide dp.

    rank of a group   (p, q), p < ep, q < expert_tp: part q of the experts p E/ep to (p + 1) E/ep
    dispatch          each token is sent once to every rank with a part of one of its experts, with its choices and weights
    combine           each rank returns the weighted sum of its experts' outputs; these are summed over the token's ranks

Legend: N tokens of this rank, K experts of a token, E experts, R ranks of a group, T received tokens, M rows (a row is a
token for one expert), D model width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.distributed.comm import CommGroup, all_gather, all_to_all
from mega_trainer.kernels.grouped_gemm import GroupedRows, grouped_wgrad_gemm
from mega_trainer.parallel.async_all_to_all import (
    AsyncAllToAll,
    HostCountAllToAll,
    start_host_copy,
    start_row_all_to_all,
)
from mega_trainer.parallel.pass_interleaver import PassInterleaver
from mega_trainer.parallel.token_rows import (
    ExpertRowAssignment,
    gather_choice_values,
    gather_token_rows,
    sum_choice_rows,
    sum_token_rows,
)

# (rows sorted by expert [M, D], their weights [M], assignment of rows to experts) -> weighted outputs [M, D]
ExpertFunction = Callable[[Tensor, Tensor, GroupedRows], Tensor]


@dataclass(frozen=True)
class SortedExpertRows:
    """Token rows for this rank's experts, sorted by expert, with one row for each pair of a token and an expert.

    Attributes:
        x: [M, D], sorted by expert.
        weights: [M].
        rows: assignment of rows to experts; unused rows may follow.
        sum_outputs: sums the experts' outputs [M, D] per token, for `TokenDispatch.combine_outputs`.
        dropped: int64, number of choices that got no row.
    """

    x: Tensor
    weights: Tensor
    rows: GroupedRows
    sum_outputs: Callable[[Tensor], Tensor]
    dropped: Tensor


def sort_rows_by_expert(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: int,
    rows: int,
    sum_rows: Callable[..., Tensor] = sum_choice_rows,
) -> SortedExpertRows:
    """Return T tokens as rows for this rank's experts, sorted by expert; choices beyond `rows` are dropped.

    Args:
        x: [T, D].
        chosen: int64 [T, K], local ids of this rank's experts; -1 for experts of other ranks, or none.
        weights: [T, K].
        experts: number of this rank's experts.
        rows: M - 1, capacity for the choices of this rank's experts.
        sum_rows: see `ExpertRowAssignment.sum_rows`.
    """
    slots = replace(ExpertRowAssignment.assign_rows(chosen, experts, rows), sum_rows=sum_rows)
    return SortedExpertRows(
        gather_token_rows(x, slots),
        gather_choice_values(weights, slots),
        GroupedRows(slots.ends),
        lambda y: sum_token_rows(y, slots),
        slots.dropped,
    )


@dataclass(frozen=True)
class TokenDispatch:
    """Expert-parallel dispatch in progress: functions that wait for received tokens and send outputs back.

    Attributes:
        wait_for_rows: waits for the received tokens.
        combine_outputs: sends back the sums of the received tokens, and returns the sums of this rank's tokens, [N, D].
        dropped: int64, number of choices that exceeded the dispatch bound; zero without a bound.
    """

    wait_for_rows: Callable[[], SortedExpertRows]
    combine_outputs: Callable[[Tensor], Tensor]
    dropped: Tensor


class ExpertDispatcher(Protocol):
    """Interface of expert-parallel dispatch and combine of tokens.
    The order of the collectives must not depend on the tokens.
    """

    def dispatch_tokens(self, x: Tensor, chosen: Tensor, weights: Tensor) -> TokenDispatch:
        """Start to send tokens to the ranks of their experts, and return the dispatch in progress.

        Args:
            x: [N, D].
            chosen: int64 [N, K], the experts of each token; -1: no expert.
            weights: [N, K], in at least fp32.
        """


def run_through_experts(dispatch: TokenDispatch, experts: ExpertFunction) -> tuple[Tensor, Tensor]:
    """Apply experts to dispatched tokens; return the weighted sums of outputs [N, D] and the number of dropped choices.
    The sums are zero for tokens without experts.
    """
    received = dispatch.wait_for_rows()
    y = experts(received.x, received.weights, received.rows)
    return dispatch.combine_outputs(received.sum_outputs(y)), dispatch.dropped + received.dropped


@dataclass(frozen=True)
class AllToAllDispatcher:
    """Expert-parallel dispatcher by torch.distributed's all-to-all: one each way, after a small one for the row counts.

    A group of one rank exchanges nothing. In larger groups the host must know the row counts: it reads them once per layer,
    while the device has other work. With a `bound` the host reads nothing: each rank is sent a fixed number of rows, and
    choices that do not fit are counted as dropped.

    Attributes:
        num_experts: E.
        group: the ep x expert_tp ranks that hold all experts.
        parts: expert_tp, the ranks that share an expert.
        bound: rows to a rank, and of its experts, as a multiple of an even load. All ranks must have equally many tokens.
        interleaver: runs another pass before a wait for exchanged rows, if there is one.
    """

    num_experts: int
    group: CommGroup
    parts: int = 1
    bound: float | None = None
    interleaver: PassInterleaver | None = None

    def dispatch_tokens(self, x: Tensor, chosen: Tensor, weights: Tensor) -> TokenDispatch:
        """Start to send tokens x to the ranks of their `chosen` experts by all-to-all, and return the dispatch."""
        if self.group.size == 1:
            rows = sort_rows_by_expert(x, chosen, weights, self.experts_per_rank, chosen.numel())
            return TokenDispatch(lambda: rows, lambda y: y, chosen.new_zeros(()))
        capacity, wire = self._rank_capacity(*chosen.shape), HostCountAllToAll(self.group)
        hidden_wire = replace(wire, interleaver=self.interleaver)
        ranks = expert_ranks_of_tokens(chosen, self.experts_per_rank, self.parts)
        size = ranks.numel() if capacity is None else capacity * self.group.size
        slots = ExpertRowAssignment.assign_rows(ranks, self.group.size, size, capacity)
        wait_for_splits = (
            self._count_splits(chosen, slots)
            if capacity is None
            else partial(self._bounded_splits, capacity, chosen.numel())
        )
        packed = pack_routing(chosen, weights, slots)  # queued before the host waits for the counts
        sent, received, count = wait_for_splits()
        slots = slots.truncate_rows(sum(sent))
        wait_for_routing = start_row_all_to_all(packed, AsyncAllToAll(wire, sent, received, sum(received) + 1))
        wait_for_tokens = start_row_all_to_all(
            gather_token_rows(x, slots), AsyncAllToAll(hidden_wire, sent, received, sum(received) + 1)
        )

        def wait_for_rows() -> SortedExpertRows:
            tokens = wait_for_tokens()  # first, as it may let another pass run; the routing was sent before the tokens
            recv_weights, recv_chosen = unpack_routing(wait_for_routing(), chosen.shape[1])
            local = local_expert_ids(recv_chosen, self.group.rank // self.parts, self.experts_per_rank)
            return sort_rows_by_expert(tokens, local, recv_weights, self.experts_per_rank, count)

        def combine_outputs(y: Tensor) -> Tensor:
            exchange = AsyncAllToAll(hidden_wire, received, sent, slots.row_count + 1)
            return sum_token_rows(start_row_all_to_all(y, exchange)(), slots)

        return TokenDispatch(wait_for_rows, combine_outputs, slots.dropped)

    @property
    def experts_per_rank(self) -> int:
        """Number of experts that a rank has, each whole or, with `expert_tp`, a slice of its hidden width."""
        return self.num_experts * self.parts // self.group.size

    def _rank_capacity(self, tokens: int, choices: int) -> int | None:
        """Return the most rows to each rank, at most the number of tokens; None without a bound."""
        if self.bound is None:
            return None
        holders = self.group.size // self.parts
        return min(tokens, math.ceil(self.bound * tokens * min(choices, holders) / holders))

    def _bounded_splits(self, capacity: int, choices: int) -> tuple[list[int], list[int], int]:
        """Return the row counts to and from each rank, and the rows of this rank's experts, given by the bound."""
        splits = [capacity] * self.group.size
        assert self.bound is not None
        return splits, splits, math.ceil(self.bound * choices * self.parts)

    def _count_splits(
        self, chosen: Tensor, slots: ExpertRowAssignment
    ) -> Callable[[], tuple[list[int], list[int], int]]:
        """Return a function that waits for the actual counts, in the form of `_bounded_splits`."""
        ranks, ends = self.group.size, slots.ends.long()
        holder = chosen.flatten() // self.experts_per_rank + 1
        choices = holder.new_zeros(ranks // self.parts + 1).scatter_add_(0, holder, torch.ones_like(holder))[1:]
        sent = torch.stack([ends.diff(prepend=ends.new_zeros(1)), choices.repeat_interleave(self.parts)], 1)
        received = all_to_all(sent, self.group, [1] * ranks, [1] * ranks)
        read = start_host_copy(torch.stack([sent, received]))

        def wait_for_splits() -> tuple[list[int], list[int], int]:
            leaving, coming = read()
            return [row for row, _ in leaving], [row for row, _ in coming], sum(choice for _, choice in coming)

        return wait_for_splits


def expert_ranks_of_tokens(chosen: Tensor, experts_per_rank: int, parts: int) -> Tensor:
    """Return the ranks that have each token's chosen experts, each rank once, -1 for none: int64 [N, K parts].
    A rank has `experts_per_rank` experts; an expert is split over `parts` ranks.
    """
    holder = chosen // experts_per_rank
    repeated = (holder.unsqueeze(-1) == holder.unsqueeze(-2)).tril(-1).any(-1)
    holder = holder.masked_fill(repeated, -1).unsqueeze(-1)
    ranks = holder * parts + torch.arange(parts, device=chosen.device)
    return ranks.masked_fill(holder < 0, -1).flatten(1)


def local_expert_ids(chosen: Tensor, holder: int, experts_per_rank: int) -> Tensor:
    """Return chosen expert ids as local ids among this rank's experts, -1 for experts of other ranks.
    The rank has `experts_per_rank` experts; `holder` is its index along ep.
    """
    local = chosen - holder * experts_per_rank
    return local.masked_fill((local < 0) | (local >= experts_per_rank), -1)


def pack_routing(chosen: Tensor, weights: Tensor, slots: ExpertRowAssignment) -> Tensor:
    """Pack the routing weights and chosen experts of each row's token in one tensor [M + 1, 2 K].
    They are sent together; expert ids are bit-cast, -1 for unused rows.
    """
    row_choices = chosen[slots.token_of_row].masked_fill(slots.choice.unsqueeze(-1) < 0, -1)
    bits = row_choices.to(torch.int64 if weights.dtype == torch.float64 else torch.int32)
    return torch.cat([gather_token_rows(weights, slots), bits.view(weights.dtype)], 1)


def unpack_routing(packed: Tensor, choices: int, received_rows: Tensor | int = -1) -> tuple[Tensor, Tensor]:
    """Return the routing weights and expert ids of each row from a packed tensor [M + 1, 2 K].
    Rows from `received_rows` on were not received and get expert id -1.
    """
    weights, bits = packed[:, :choices], packed[:, choices:].detach().clone(memory_format=torch.contiguous_format)
    chosen = bits.view(torch.int64 if packed.dtype == torch.float64 else torch.int32).long()
    if isinstance(received_rows, Tensor):
        return weights, chosen.masked_fill(
            (torch.arange(len(chosen), device=received_rows.device) >= received_rows).unsqueeze(-1), -1
        )
    chosen[received_rows:].fill_(-1)
    return weights, chosen


class _GroupedBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, weights: Tensor | None, rows: GroupedRows) -> Tensor:
        ctx.save_for_backward(bias, weights)
        ctx.rows = rows
        own = bias[rows.group_of_rows(len(x))]
        return x + (own if weights is None else own * weights.to(own.dtype).unsqueeze(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        bias, weights = ctx.saved_tensors
        dbias = None
        if ctx.needs_input_grad[1]:
            # a GEMM with ones, since a scattered sum is in any order on a GPU; the grouped kernel needs eight columns
            ones = dy.new_ones(dy.shape[0], 8) if weights is None else weights.to(dy.dtype).unsqueeze(-1).repeat(1, 8)
            dbias = grouped_wgrad_gemm(dy, ones, ctx.rows)[..., 0].contiguous()
        if weights is None:
            return dy, dbias, None, None
        dweights = torch.linalg.vecdot(dy, bias[ctx.rows.group_of_rows(len(dy))])
        return dy, dbias, dweights.to(weights.dtype), None


def add_grouped_bias(x: Tensor, bias: Tensor, rows: GroupedRows, weights: Tensor | None = None) -> Tensor:
    """Return x plus each row's group (expert) bias, times the row's weight if given, differentiable: [M, N] + [G, N]."""
    y: Tensor = _GroupedBias.apply(x, bias, weights, rows)  # type: ignore[no-untyped-call]
    return y


class _TakeShare(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup) -> Tensor:
        ctx.group, ctx.tokens = group, x.shape[0]
        return _padded_share(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.group)[: ctx.tokens], None


class _GatherShares(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CommGroup, tokens: int) -> Tensor:
        ctx.group = group
        return all_gather(x, group)[:tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _padded_share(dy, ctx.group), None, None


def _padded_share(x: Tensor, group: CommGroup) -> Tensor:
    size = -(-x.shape[0] // group.size)
    own = x[group.rank * size : (group.rank + 1) * size]
    return torch.cat([own, own.new_zeros(size - own.shape[0], *x.shape[1:])])


def take_token_share(x: Tensor, group: CommGroup) -> Tensor:
    """Return this rank's share of tokens that all ranks of a group have, padded with zeros.
    The tokens are x [N, ..], the share is [ceil(N / ranks), ..].

    The backward gathers the gradients of all ranks, so that each has the whole gradient.
    """
    return x if group.size == 1 else _TakeShare.apply(x, group)  # type: ignore[no-untyped-call]


def gather_token_shares(x: Tensor, group: CommGroup, tokens: int) -> Tensor:
    """Gather the shares that `take_token_share` made from all ranks to [tokens, ..], without their padding.
    The shares are [ceil(N / ranks), ..]; the backward takes this rank's share.
    """
    return x if group.size == 1 else _GatherShares.apply(x, group, tokens)  # type: ignore[no-untyped-call]
