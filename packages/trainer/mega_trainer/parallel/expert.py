"""Expert parallelism: tokens travel to the ranks that hold their experts, and back (arXiv:2006.16668).

Each rank brings tokens of its own: under sequence parallelism its part of the sequence, without it a share of those that
all tensor ranks hold alike. The ranks of a stage, of all data, context and tensor ranks, are cut into groups of
ep x expert_tp neighbours that hold all experts between them; so ep need not divide dp.

    rank of a group   p q, p < ep, q < expert_tp: part q of the experts p E/ep to (p + 1) E/ep
    there             each token once to every rank that holds a part of an expert of its, with its choice and weights
    back              the weighted sum of what that rank's experts made of it; the token's ranks are summed

Legend: N tokens of this rank, K experts of a token, E experts, R ranks of a group, T tokens that came, M rows (a row is a
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

from mega_trainer.comm import Group, all_gather, all_to_all
from mega_trainer.kernels.grouped import Rows, outer
from mega_trainer.parallel.exchange import Exchange, HostWire, fetched, start
from mega_trainer.parallel.slots import Slots, collect, gather, pick, summed

# rows of this rank's experts, sorted by expert [M, D], and their weights [M] -> what is to be summed [M, D]
Experts = Callable[[Tensor, Tensor, Rows], Tensor]


@dataclass(frozen=True)
class Sorted:
    """Tokens that meet this rank's experts, a row for each token and expert.

    Attributes:
        x: [M, D], sorted by expert.
        weights: [M].
        rows: which are whose; there may be others behind them.
        back: takes what the experts made of them, [M, D].
        lost: int64, choices that found no row.
    """

    x: Tensor
    weights: Tensor
    rows: Rows
    back: Callable[[Tensor], Tensor]
    lost: Tensor


def by_expert(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: int, rows: int, total: Callable[..., Tensor] = summed
) -> Sorted:
    """Rows for T tokens, made and put together here.

    Args:
        x: [T, D].
        chosen: int64 [T, K], which of this rank's experts; -1 for others' and none.
        weights: [T, K].
        experts: of this rank.
        rows: M - 1, at least as many as there are choices of this rank's experts.
        total: makes sums of rows; see `Slots.sum`.
    """
    slots = replace(Slots.of(chosen, experts, rows), sum=total)
    return Sorted(gather(x, slots), pick(weights, slots), Rows(slots.ends), lambda y: collect(y, slots), slots.lost)


@dataclass(frozen=True)
class Delivery:
    """Tokens on their way.

    Attributes:
        arrived: waits for those that come here.
        back: takes what these became, and returns the sums of this rank's tokens, [N, D].
        lost: int64, choices that did not fit; always none where nothing bounds them.
    """

    arrived: Callable[[], Sorted]
    back: Callable[[Tensor], Tensor]
    lost: Tensor


class Dispatcher(Protocol):
    """Brings tokens to experts and their outputs back. The order of the collectives must not depend on the tokens."""

    def send(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Delivery:
        """Start to bring tokens to their experts.

        Args:
            x: [N, D].
            chosen: int64 [N, K], the experts of each token; -1 for none.
            weights: [N, K], in at least fp32.
        """


def through(delivery: Delivery, experts: Experts) -> tuple[Tensor, Tensor]:
    """The weighted sum of each token's experts, [N, D], zero for tokens without any, and how many choices were lost."""
    here = delivery.arrived()
    y = experts(here.x, here.weights, here.rows)
    return delivery.back(here.back(y)), delivery.lost + here.lost


@dataclass(frozen=True)
class AllToAll:
    """A `Dispatcher` by one all-to-all each way, and a small one before that.

    Alone it moves nothing. Among several ranks as many rows travel as there are, which the host must know: it reads the
    counts once a layer, behind work that the device has to do meanwhile. With a `bound` it reads nothing: to each rank
    goes a fixed number of rows, and what does not fit is told as lost.

    Attributes:
        num_experts: E.
        group: the ep x expert_tp ranks that hold all experts.
        parts: expert_tp, the ranks that share an expert.
        bound: rows to a rank, and of its experts, as a multiple of an even load. All ranks must bring as many tokens.
    """

    num_experts: int
    group: Group
    parts: int = 1
    bound: float | None = None

    def send(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Delivery:
        """See `Dispatcher`."""
        if self.group.size == 1:
            alone = by_expert(x, chosen, weights, self.own, chosen.numel())
            return Delivery(lambda: alone, lambda y: y, chosen.new_zeros(()))
        capacity, wire = self._capacity(*chosen.shape), HostWire(self.group)
        ranks = ranks_of(chosen, self.own, self.parts)
        size = ranks.numel() if capacity is None else capacity * self.group.size
        slots = Slots.of(ranks, self.group.size, size, capacity)
        splits = self._counted(chosen, slots) if capacity is None else partial(self._bounded, capacity, chosen.numel())
        ticket = ticket_of(chosen, weights, slots)
        sent, received, count = splits()
        slots = slots.first(sum(sent))
        choices = start(ticket, Exchange(wire, sent, received, sum(received) + 1))
        tokens = start(gather(x, slots), Exchange(wire, sent, received, sum(received) + 1))

        def arrived() -> Sorted:
            came, theirs = read_ticket(choices(), chosen.shape[1])
            theirs = own_of(theirs, self.group.rank // self.parts, self.own)
            return by_expert(tokens(), theirs, came, self.own, count)

        def back(y: Tensor) -> Tensor:
            return collect(start(y, Exchange(wire, received, sent, slots.rows + 1))(), slots)

        return Delivery(arrived, back, slots.lost)

    @property
    def own(self) -> int:
        """Experts of a rank."""
        return self.num_experts * self.parts // self.group.size

    def _capacity(self, tokens: int, choices: int) -> int | None:
        """Rows to each rank, where they are bounded: no more than there are tokens."""
        if self.bound is None:
            return None
        holders = self.group.size // self.parts
        return min(tokens, math.ceil(self.bound * tokens * min(choices, holders) / holders))

    def _bounded(self, capacity: int, choices: int) -> tuple[list[int], list[int], int]:
        """Rows to and from each rank, and those of this rank's experts."""
        splits = [capacity] * self.group.size
        assert self.bound is not None
        return splits, splits, math.ceil(self.bound * choices * self.parts)

    def _counted(self, chosen: Tensor, slots: Slots) -> Callable[[], tuple[list[int], list[int], int]]:
        """As `_bounded`, of what there really is."""
        ranks, ends = self.group.size, slots.ends.long()
        holder = chosen.flatten() // self.own + 1
        choices = holder.new_zeros(ranks // self.parts + 1).scatter_add_(0, holder, torch.ones_like(holder))[1:]
        sent = torch.stack([ends.diff(prepend=ends.new_zeros(1)), choices.repeat_interleave(self.parts)], 1)
        received = all_to_all(sent, self.group, [1] * ranks, [1] * ranks)
        read = fetched(torch.stack([sent, received]))

        def splits() -> tuple[list[int], list[int], int]:
            leaving, coming = read()
            return [row for row, _ in leaving], [row for row, _ in coming], sum(choice for _, choice in coming)

        return splits


def ranks_of(chosen: Tensor, own: int, parts: int) -> Tensor:
    """The ranks that each token goes to, each of them once: int64 [N, K parts], -1 for none; a rank has `own` experts."""
    holder = chosen // own
    again = (holder.unsqueeze(-1) == holder.unsqueeze(-2)).tril(-1).any(-1)
    holder = holder.masked_fill(again, -1).unsqueeze(-1)
    each = holder * parts + torch.arange(parts, device=chosen.device)
    return each.masked_fill(holder < 0, -1).flatten(1)


def own_of(chosen: Tensor, holder: int, own: int) -> Tensor:
    """Which of this rank's `own` experts, where it is the `holder`-th of those that hold others."""
    local = chosen - holder * own
    return local.masked_fill((local < 0) | (local >= own), -1)


def ticket_of(chosen: Tensor, weights: Tensor, slots: Slots) -> Tensor:
    """For each row its token's weights and choices as one tensor [M + 1, 2 K], the choices as bits; -1 for nobody's row."""
    theirs = chosen[slots.token].masked_fill(slots.choice.unsqueeze(-1) < 0, -1)
    bits = theirs.to(torch.int64 if weights.dtype == torch.float64 else torch.int32)
    return torch.cat([gather(weights, slots), bits.view(weights.dtype)], 1)


def read_ticket(ticket: Tensor, choices: int, there: Tensor | int = -1) -> tuple[Tensor, Tensor]:
    """The way back; rows from number `there` on, which nobody sent, choose none."""
    weights, bits = ticket[:, :choices], ticket[:, choices:].detach().clone(memory_format=torch.contiguous_format)
    chosen = bits.view(torch.int64 if ticket.dtype == torch.float64 else torch.int32).long()
    if isinstance(there, Tensor):
        return weights, chosen.masked_fill((torch.arange(len(chosen), device=there.device) >= there).unsqueeze(-1), -1)
    chosen[there:] = -1
    return weights, chosen


class _GroupedBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, weights: Tensor | None, rows: Rows) -> Tensor:
        ctx.save_for_backward(bias, weights)
        ctx.rows = rows
        own = bias[rows.group(len(x))]
        return x + (own if weights is None else own * weights.to(own.dtype).unsqueeze(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        bias, weights = ctx.saved_tensors
        dbias = None
        if ctx.needs_input_grad[1]:
            # a product with ones: a scattered sum would add in any order on a GPU. Eight columns suit the grouped kernel
            ones = dy.new_ones(dy.shape[0], 8) if weights is None else weights.to(dy.dtype).unsqueeze(-1).repeat(1, 8)
            dbias = outer(dy, ones, ctx.rows)[..., 0].contiguous()
        if weights is None:
            return dy, dbias, None, None
        dweights = torch.linalg.vecdot(dy, bias[ctx.rows.group(len(dy))])
        return dy, dbias, dweights.to(weights.dtype), None


def grouped_bias(x: Tensor, bias: Tensor, rows: Rows, weights: Tensor | None = None) -> Tensor:
    """To each row its group's bias, times the row's weight [M] where there are weights: [M, N] + [G, N] -> [M, N]."""
    y: Tensor = _GroupedBias.apply(x, bias, weights, rows)  # type: ignore[no-untyped-call]
    return y


class _OwnShare(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.tokens = group, x.shape[0]
        return _share(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_gather(dy, ctx.group)[: ctx.tokens], None


class _AllShares(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, tokens: int) -> Tensor:
        ctx.group = group
        return all_gather(x, group)[:tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _share(dy, ctx.group), None, None


def _share(x: Tensor, group: Group) -> Tensor:
    size = -(-x.shape[0] // group.size)
    own = x[group.rank * size : (group.rank + 1) * size]
    return torch.cat([own, own.new_zeros(size - own.shape[0], *x.shape[1:])])


def own_share(x: Tensor, group: Group) -> Tensor:
    """This rank's of the tokens [N, ..] that all ranks hold: [ceil(N / ranks), ..], filled up with zeros.

    The gradients of all ranks make up the whole one, which each gets.
    """
    return x if group.size == 1 else _OwnShare.apply(x, group)  # type: ignore[no-untyped-call]


def all_shares(x: Tensor, group: Group, tokens: int) -> Tensor:
    """All ranks' shares [ceil(N / ranks), ..] as the N = `tokens` they are of; each rank takes its gradient from its own."""
    return x if group.size == 1 else _AllShares.apply(x, group, tokens)  # type: ignore[no-untyped-call]
