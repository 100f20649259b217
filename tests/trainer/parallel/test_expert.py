"""Dispatch over ranks: every token meets its experts wherever they are, and each product is made once."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from mega_common.model_config import MoeConfig
from mega_trainer.comm import Group
from mega_trainer.kernels.grouped import Rows
from mega_trainer.model.router import within_capacity
from mega_trainer.model.routing import Tokens
from mega_trainer.parallel.expert import AllToAll, all_shares, grouped_bias, own_share, sorted_slots

E, D = 8, 3


def factor(expert: int) -> float:
    """What the expert multiplies by, in these tests."""
    return float(2**expert)


def dispatched(ep: int, parts: int, empty: bool) -> tuple[Tensor, Tensor, Tensor, int]:
    """On each rank: error of the output and of the gradient, gradient of an expert's factor, rows it worked on."""
    rank = dist.get_rank()
    group = Group("ep", tuple(range(ep * parts)), rank, dist.group.WORLD)
    g = torch.Generator().manual_seed(rank)
    x = torch.randn(4 + rank, D, generator=g, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(4 + rank, 2, generator=g, dtype=torch.float64)
    chosen = torch.rand(4 + rank, E if not empty else E // 2, generator=g).topk(2).indices
    chosen[0, 1] = -1
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    first = rank // parts * (E // ep)
    worked = []

    def experts(rows: Tensor, by: Rows) -> Tensor:
        worked.append(len(rows))
        factors = torch.tensor([factor(first + i) for i in range(E // ep)], dtype=rows.dtype)
        # each part contributes its share of the output
        return rows * (factors.repeat_interleave(torch.tensor(by.counts)) / parts).unsqueeze(-1) * scale

    y = AllToAll(E, group, parts)(x, chosen, weights, experts)
    y.sum().backward()
    both = torch.where(chosen >= 0, 2.0 ** chosen.double() * weights, 0.0).sum(-1, keepdim=True)
    assert x.grad is not None
    grad = torch.zeros((), dtype=torch.float64) if scale.grad is None else scale.grad
    return (y - both * x).abs().max().detach(), (x.grad - both).abs().max(), grad, worked[0]


def test_tokens_meet_their_experts() -> None:
    for ep, parts in [(4, 1), (2, 2), (1, 4)]:
        for y, grad, *_ in run_ranks(dispatched, 4, ep, parts, False):
            assert y < 1e-14 and grad < 1e-14  # noqa: PT018


def test_ranks_whose_experts_get_no_token() -> None:
    results = run_ranks(dispatched, 4, 4, 1, True)
    assert [rows > 0 for *_, rows in results] == [True, True, False, False]
    assert [grad.item() != 0 for _, _, grad, _ in results] == [True, True, False, False]
    assert all(y < 1e-14 and grad < 1e-14 for y, grad, *_ in results)


def test_slots_are_sorted_by_expert_and_then_by_token() -> None:
    chosen = torch.tensor([[3, 0], [-1, 3], [0, -1]])
    assert sorted_slots(chosen, 4).tolist() == [1, 4, 0, 3]


def test_each_row_gets_its_groups_bias() -> None:
    counts = [3, 0, 2]
    x, bias = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    dy = torch.randn(5, 4, dtype=torch.float64)
    of_row = [0, 0, 0, 2, 2]
    y = grouped_bias(x, bias, Rows.of(counts, x.device))
    torch.testing.assert_close(y, x + bias[of_row])
    y.backward(dy)
    torch.testing.assert_close(x.grad, dy)
    torch.testing.assert_close(bias.grad, torch.stack([dy[:3].sum(0), torch.zeros_like(dy[0]), dy[3:].sum(0)]))


def shares() -> tuple[Tensor, Tensor, Tensor]:
    group = Group("tp", (0, 1, 2), dist.get_rank(), dist.group.WORLD)
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    own = own_share(x, group)
    y = all_shares(own * (group.rank + 1), group, 4)
    (y * torch.arange(1.0, 5.0).unsqueeze(-1)).sum().backward()
    assert x.grad is not None
    return own.detach(), y.detach(), x.grad


def test_tensor_ranks_share_tokens_that_all_hold() -> None:
    x = torch.arange(8.0).view(4, 2)
    factors = torch.tensor([1.0, 1.0, 2.0, 2.0]).unsqueeze(-1)  # the third rank's share is all padding
    results = run_ranks(shares, 3)
    assert torch.equal(torch.cat([own for own, *_ in results])[:4], x)
    for _, y, grad in results:
        assert torch.equal(y, x * factors)
        assert torch.equal(grad, (factors * torch.arange(1.0, 5.0).unsqueeze(-1)).expand(4, 2))


MOE = MoeConfig(num_experts=E, top_k=2, ffn_hidden_size=4, capacity_factor=0.7)


def kept_by_ranks(chosen: Tensor) -> Tensor:
    """Of two sequences of eight, four ranks hold two positions each."""
    group = Group("tp", tuple(range(4)), dist.get_rank(), dist.group.WORLD)
    row, place = torch.arange(2).repeat_interleave(8), torch.arange(8).repeat(2)
    mine = (place // 2 == group.rank).nonzero().flatten().flip(0)  # in any order
    at = Tokens(row[mine], place[mine], torch.ones(4, dtype=torch.bool), 2, 8)
    out = torch.full_like(chosen, -2)
    out[mine] = within_capacity(chosen[mine], at, MOE, (group, Group("cp")))
    return out


def test_what_is_dropped_does_not_depend_on_the_ranks() -> None:
    chosen = torch.rand(16, E, generator=torch.Generator().manual_seed(3)).topk(2).indices
    row, place = torch.arange(2).repeat_interleave(8), torch.arange(8).repeat(2)
    at = Tokens(row, place, torch.ones(16, dtype=torch.bool), 2, 8)
    alone = within_capacity(chosen, at, MOE, (Group("tp"), Group("cp")))
    parts = torch.stack(run_ranks(kept_by_ranks, 4, chosen)).amax(0)
    assert torch.equal(parts, alone)
    assert (alone < 0).any()
    for (first, stop), capacity in zip(pairwise(accumulate([8, 8], initial=0)), [2, 2], strict=True):
        assert torch.bincount(alone[first:stop].flatten() + 1, minlength=E + 1)[1:].max() <= capacity
