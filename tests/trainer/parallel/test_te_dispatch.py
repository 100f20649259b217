"""Experts by Transformer Engine: what we make of its answers, over a stand-in on gloo. `test_published` checks the calls."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.autograd import Function
from trainer.kernels.published import ARCHIVES, Library
from trainer.parallel.test_expert_parallel import Found, dispatched

from mega_common.errors import ConfigError
from mega_trainer.distributed.comm import CommGroup, all_gather
from mega_trainer.parallel.te_dispatch import TransformerEngineDispatcher


class Buffer:
    """A buffer of one dispatch, and the stand-in for the kernels: rows are sorted by expert, and then by rank and token."""

    def __init__(self, top_k: int, most: int, width: int, own: int, *, recv_capacity_per_rank: int) -> None:
        self.group = CommGroup("ep", tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
        self.own, self.room, self.most = own, recv_capacity_per_rank, most

    def prepare(self, chosen: Tensor) -> None:
        mine = all_gather(chosen, self.group) - self.group.rank * self.own
        at = torch.cat([(mine.flatten() == expert).nonzero().flatten() for expert in range(self.own)])
        self.total_recv_tokens = torch.tensor([len(at)])
        self.at = at[: self.room]
        self.counts = torch.bincount(mine.flatten()[self.at], minlength=self.own)
        self.choices = chosen.shape[1]

    def fetch(self, values: Tensor) -> Tensor:
        """A row of every rank's [N, ..] for each that comes, and anything behind."""
        rows = all_gather(values, self.group)[self.at]
        return torch.cat([rows, rows.new_full((self.room - len(rows), *rows.shape[1:]), torch.nan)])

    def bring(self, rows: Tensor, count: int) -> Tensor:
        """The sums of what is made of every rank's `count` values, for this rank's."""
        whole = rows.new_zeros(count * self.group.size, *rows.shape[1:])
        whole.index_add_(0, self.at, rows[: len(self.at)])
        dist.all_reduce(whole)
        return whole.chunk(self.group.size)[self.group.rank]


class Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, buffer: Buffer) -> tuple[Tensor, Tensor]:
        ctx.buffer, ctx.count = buffer, weights.numel()
        return buffer.fetch(x.repeat_interleave(buffer.choices, 0)), buffer.fetch(weights.flatten())

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dweights: Tensor) -> tuple[Tensor, Tensor, None]:
        dx, dweights = (ctx.buffer.bring(t, ctx.count).unflatten(0, (-1, ctx.buffer.choices)) for t in (dx, dweights))
        return dx.sum(1), dweights, None


class Combine(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, buffer: Buffer, tokens: int) -> Tensor:
        ctx.buffer = buffer
        return buffer.bring(y, tokens * buffer.choices).unflatten(0, (tokens, -1)).sum(1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.buffer.fetch(dy.repeat_interleave(ctx.buffer.choices, 0)), None, None


def stand_in(begun: list[tuple[Any, ...]]) -> dict[str, ModuleType]:
    def ep_dispatch(buffer: Buffer, x: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert len(x) <= buffer.most
        buffer.prepare(chosen)
        return *Dispatch.apply(x, weights, buffer), buffer.counts  # type: ignore[no-untyped-call]

    def ep_combine(buffer: Buffer, y: Tensor, *, num_local_tokens: int) -> Any:
        return Combine.apply(y, buffer, num_local_tokens)  # type: ignore[no-untyped-call]

    ep = ModuleType("transformer_engine.pytorch.ep")
    ep.is_ep_bootstrapped = lambda: bool(begun)  # type: ignore[attr-defined]
    ep.ep_bootstrap = lambda *args, **how: begun.append(args)  # type: ignore[attr-defined]
    ep.EpBuffer, ep.ep_dispatch, ep.ep_combine = Buffer, ep_dispatch, ep_combine  # type: ignore[attr-defined]
    package, torch_part = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    torch_part.ep = ep  # type: ignore[attr-defined]
    return {"transformer_engine": package, "transformer_engine.pytorch": torch_part}


def by_te(ep: int, empty: bool, bound: float) -> Found:
    begun: list[tuple[Any, ...]] = []
    with mock.patch.dict(sys.modules, stand_in(begun)):
        found = dispatched(
            ep, 1, empty, bound, lambda experts, group, _, bound: TransformerEngineDispatcher(experts, group, bound)
        )
    assert [args[1:] for args in begun] == [(8, 4, 3, 3)]
    return found


def test_tokens_meet_their_experts() -> None:
    for empty in (False, True):
        results = run_ranks(by_te, 4, 4, empty, 4.0)
        assert all(max(found.errors) < 1e-12 and found.lost == 0 for found in results)
        assert {found.rows for found in results} == {4 * 3 * 4 + 1}


def test_what_finds_no_room_is_told() -> None:
    results = run_ranks(by_te, 4, 4, True, 1.0)
    assert sum(found.lost for found in results) > 0
    assert sum(found.worked + found.lost for found in results) == 4 * (4 * 3 - 1)


def test_how_many_came_is_where_we_read_it() -> None:
    (wheel,) = ARCHIVES.glob("transformer_engine-2.20.*.whl")
    source = Library(wheel).files["transformer_engine/pytorch/ep.py"]
    assert "self.total_recv_tokens = torch.empty(1, dtype=torch.int64, device=device)" in source


def test_where_it_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.dispatch = te"):
        TransformerEngineDispatcher(8, CommGroup("ep", (0, 1)), 2.0).dispatch_tokens(
            torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
        )
