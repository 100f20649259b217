"""Expert parallelism: tokens travel to the ranks that hold their experts, and back (arXiv:2006.16668).

Each rank brings tokens of its own: under sequence parallelism its part of the sequence, without it a share of those that
all tensor ranks hold alike. The ranks of a stage, of all data, context and tensor ranks, are cut into groups of
ep x expert_tp neighbours that hold all experts between them; so ep need not divide dp.

    rank of a group   p q, p < ep, q < expert_tp: part q of the experts p E/ep to (p + 1) E/ep
    there             each chosen token to every part of its expert: an all-to-all with uneven splits
    back              the same way; the parts are summed, then the experts of a token by their weights

Legend: N tokens of this rank, K experts of a token, E experts, M rows (a row is a token for one expert), D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.comm import Group, all_gather, all_to_all
from mega_trainer.kernels.grouped import Rows, outer

Experts = Callable[[Tensor, Rows], Tensor]  # the rows [M, D] of this rank's experts, sorted by expert -> [M, D]


class Dispatcher(Protocol):
    """Brings tokens to experts and their outputs back. The order of the collectives must not depend on the tokens."""

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """The weighted sum of each token's experts.

        Args:
            x: [N, D].
            chosen: int64 [N, K], the experts of each token; -1 for none.
            weights: [N, K].
            experts: what this rank's experts do with rows.

        Returns:
            [N, D], zero for tokens without any expert.
        """


@dataclass(frozen=True)
class AllToAll:
    """A `Dispatcher` by one all-to-all each way.

    Attributes:
        num_experts: E.
        group: the ep x expert_tp ranks that hold all experts.
        parts: expert_tp, the ranks that share an expert.
    """

    num_experts: int
    group: Group
    parts: int = 1

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """See `Dispatcher`."""
        trip = self._plan(chosen)
        slots = sorted_slots(chosen, sum(trip.leaving[:: self.parts]))
        rows: Tensor = _Spread.apply(x, slots, chosen.shape[1])  # type: ignore[no-untyped-call]
        rows = experts(self._there(rows, trip), trip.rows)
        rows = self._back(rows, trip)
        outputs: Tensor = _Collect.apply(rows, slots, tuple(chosen.shape))  # type: ignore[no-untyped-call]
        return torch.einsum("nk,nkd->nd", weights.to(outputs.dtype), outputs)

    def _plan(self, chosen: Tensor) -> _Trip:
        """Tell every rank how many rows come to each of its experts."""
        ranks, device = self.group.size, chosen.device
        places = chosen.flatten() + 1
        counts = places.new_zeros(self.num_experts + 1).scatter_add_(0, places, torch.ones_like(places))[1:]
        sent = counts.view(ranks // self.parts, -1).repeat_interleave(self.parts, 0)
        received = all_to_all(sent, self.group, [1] * ranks, [1] * ranks)
        table = torch.cat([sent, received]).tolist()  # the one wait for the device
        leaving, coming = ([sum(row) for row in half] for half in (table[:ranks], table[ranks:]))
        expert = torch.arange(received.shape[1], device=device).repeat(ranks)
        order = expert.repeat_interleave(received.flatten(), output_size=sum(coming)).argsort(stable=True)
        rows = Rows.of([sum(column) for column in zip(*table[ranks:], strict=True)], device)
        return _Trip(leaving, coming, order, order.argsort(), rows)

    def _there(self, rows: Tensor, trip: _Trip) -> Tensor:
        """Rows sorted by expert, of this rank's tokens -> of this rank's experts."""
        if self.group.size == 1:
            return rows
        if self.parts > 1:
            pieces = torch.split(rows, trip.leaving[:: self.parts])
            rows = torch.cat([piece for piece in pieces for _ in range(self.parts)])
        rows = all_to_all(rows, self.group, trip.coming, trip.leaving)
        sorted_rows: Tensor = _Permute.apply(rows, trip.order, trip.inverse)  # type: ignore[no-untyped-call]
        return sorted_rows

    def _back(self, rows: Tensor, trip: _Trip) -> Tensor:
        """The way of `_there` backwards."""
        if self.group.size == 1:
            return rows
        rows = _Permute.apply(rows, trip.inverse, trip.order)  # type: ignore[no-untyped-call]
        rows = all_to_all(rows, self.group, trip.leaving, trip.coming)
        if self.parts == 1:
            return rows
        pieces = torch.split(rows, trip.leaving)
        return torch.cat([sum(pieces[i + 1 : i + self.parts], pieces[i]) for i in range(0, len(pieces), self.parts)])


@dataclass(frozen=True)
class _Trip:
    """Rows to and from each rank of the group, the order that sorts those that came by expert and the one back, and how
    many each expert has."""

    leaving: list[int]
    coming: list[int]
    order: Tensor
    inverse: Tensor
    rows: Rows


def sorted_slots(chosen: Tensor, count: int) -> Tensor:
    """The `count` places in `chosen` [N, K], flattened, that hold an expert, sorted by expert and then by token."""
    return chosen.flatten().argsort(stable=True)[chosen.numel() - count :]


class _Spread(Function):
    """Tokens [N, D] to a row for each slot [M, D]; not by index_select, whose gradient adds in any order on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.shape = (x.shape[0], choices)
        return x[slots // choices]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return _placed(dy, slots, ctx.shape).sum(1), None, None


class _Collect(Function):
    """Rows [M, D] to their slots [N, K, D], zero where there is none."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(slots)
        return _placed(rows, slots, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return dy.flatten(0, 1)[slots], None, None


def _placed(rows: Tensor, slots: Tensor, shape: tuple[int, int]) -> Tensor:
    out = rows.new_zeros(shape[0] * shape[1], rows.shape[-1])
    out[slots] = rows
    return out.view(*shape, rows.shape[-1])


class _Permute(Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy[inverse], None, None


class _GroupedBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        counts = rows.ends.diff(prepend=rows.ends.new_zeros(1))
        return x + bias.repeat_interleave(counts, 0, output_size=x.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        # a product with ones: a scattered sum would add in any order on a GPU. Eight columns suit the grouped kernel
        sums = outer(dy, dy.new_ones(dy.shape[0], 8), ctx.rows)
        return dy, sums[..., 0].contiguous(), None


def grouped_bias(x: Tensor, bias: Tensor, rows: Rows) -> Tensor:
    """To each row its group's bias: [M, N] + [G, N] -> [M, N]."""
    y: Tensor = _GroupedBias.apply(x, bias, rows)  # type: ignore[no-untyped-call]
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
