"""Dispatch over ranks: every token meets its experts wherever they are, and each product is made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from mega_common.model_config import MoeConfig
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.model.expert_router import drop_choices_over_capacity
from mega_trainer.parallel.expert_parallel import (
    AllToAllDispatcher,
    ExpertDispatcher,
    add_grouped_bias,
    gather_token_shares,
    run_through_experts,
    take_token_share,
)
from mega_trainer.parallel.expert_routing import RoutedTokens

E, D = 8, 3


@dataclass(frozen=True)
class Found:
    """On one rank: errors of the output and of the gradients of tokens and weights, the gradient of the experts' scale, the
    rows that its experts worked on, the table's that they came in, and what was lost."""

    errors: tuple[float, float, float]
    scale: float
    worked: int
    rows: int
    lost: int


def dispatched(
    ep: int,
    parts: int,
    empty: bool,
    bound: float | None = None,
    way: Callable[..., ExpertDispatcher] = AllToAllDispatcher,
) -> Found:
    """Tokens through experts of which number e multiplies by 2^e."""
    rank = dist.get_rank()
    group = CommGroup("ep", tuple(range(ep * parts)), rank, dist.group.WORLD)
    g = torch.Generator().manual_seed(rank)
    tokens = 4 + (rank if bound is None else 0)
    x = torch.randn(tokens, D, generator=g, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, 3, generator=g, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(tokens, E if not empty else E // 2, generator=g).topk(3).indices
    chosen[0, 1] = -1
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    first = rank // parts * (E // ep)
    seen = []

    def experts(rows: Tensor, weights: Tensor, by: GroupedRows) -> Tensor:
        count = by.group_slices[-1].stop
        seen.append((count, len(rows)))
        factors = 2.0 ** (first + by.group_of_rows(count).double())
        # each part contributes its share of the output; what no expert owns is not a number, as on a GPU it may be
        y = rows[:count] * (factors / parts * weights[:count]).unsqueeze(-1) * scale
        return torch.cat([y, torch.full_like(rows[count:], torch.nan)])

    y, lost = run_through_experts(way(E, group, parts, bound).dispatch_tokens(x, chosen, weights), experts)
    dy = torch.randn(tokens, D, generator=g, dtype=torch.float64)
    y.backward(dy)
    both = torch.where(chosen >= 0, 2.0 ** chosen.double(), 0.0)
    factor = (both * weights).sum(-1, keepdim=True).detach()
    assert x.grad is not None
    assert weights.grad is not None
    wanted = (factor * x, factor * dy, both * (x * dy).sum(-1, keepdim=True))
    found = (y, x.grad, weights.grad)
    errors = [(a - b).abs().max().item() for a, b in zip(found, wanted, strict=True)]
    grad = 0.0 if scale.grad is None else scale.grad.item()
    return Found((errors[0], errors[1], errors[2]), grad, *seen[0], lost.item())


LAYOUTS = [(4, 1), (2, 2), (1, 4)]


def test_tokens_meet_their_experts() -> None:
    for ep, parts in LAYOUTS:
        for found in run_ranks(dispatched, 4, ep, parts, False):
            assert max(found.errors) < 1e-12
            assert found.worked == found.rows - 1
            assert found.lost == 0


def test_ranks_whose_experts_get_no_token() -> None:
    results = run_ranks(dispatched, 4, 4, 1, True)
    assert [found.worked > 0 for found in results] == [True, True, False, False]
    assert [found.scale != 0 for found in results] == [True, True, False, False]
    assert all(max(found.errors) < 1e-12 for found in results)


def test_rows_of_a_fixed_number() -> None:
    """With a bound the tables are as long whatever is chosen; one of all there could be loses nothing."""
    for ep, parts in LAYOUTS:
        for uneven in (False, True):
            results = run_ranks(dispatched, 4, ep, parts, uneven, float(ep))
            assert all(max(found.errors) < 1e-12 and found.lost == 0 for found in results)
            assert {found.rows for found in results} == {4 * 3 * parts * ep + 1}


def test_what_finds_no_room_is_told() -> None:
    results = run_ranks(dispatched, 4, 4, 1, True, 1.0)
    assert sum(found.lost for found in results) > 0
    assert (
        sum(found.worked + found.lost for found in results) >= 4 * (4 * 3 - 1) - 4 * 4
    )  # a token may lose several at once


def test_each_row_gets_its_groups_bias() -> None:
    counts = [3, 0, 2]
    x, bias = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    dy = torch.randn(5, 4, dtype=torch.float64)
    of_row = [0, 0, 0, 2, 2]
    y = add_grouped_bias(x, bias, GroupedRows.from_counts(counts, x.device))
    torch.testing.assert_close(y, x + bias[of_row])
    y.backward(dy)
    torch.testing.assert_close(x.grad, dy)
    torch.testing.assert_close(bias.grad, torch.stack([dy[:3].sum(0), torch.zeros_like(dy[0]), dy[3:].sum(0)]))


def test_a_bias_may_be_weighted() -> None:
    x, bias, weights = (torch.randn(*n, dtype=torch.float64, requires_grad=True) for n in ((5, 4), (3, 4), (5,)))
    assert torch.autograd.gradcheck(
        lambda *t: add_grouped_bias(*t[:2], GroupedRows.from_counts([3, 0, 2], x.device), t[2]), (x, bias, weights)
    )
    y = add_grouped_bias(x, bias, GroupedRows.from_counts([3, 0, 2], x.device), weights)
    torch.testing.assert_close(y, x + weights.unsqueeze(-1) * bias[[0, 0, 0, 2, 2]])


def shares() -> tuple[Tensor, Tensor, Tensor]:
    group = CommGroup("tp", (0, 1, 2), dist.get_rank(), dist.group.WORLD)
    x = torch.arange(8.0).view(4, 2).requires_grad_()
    own = take_token_share(x, group)
    y = gather_token_shares(own * (group.rank + 1), group, 4)
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
    group = CommGroup("tp", tuple(range(4)), dist.get_rank(), dist.group.WORLD)
    row, place = torch.arange(2).repeat_interleave(8), torch.arange(8).repeat(2)
    mine = (place // 2 == group.rank).nonzero().flatten().flip(0)  # in any order
    at = RoutedTokens(row[mine], place[mine], torch.ones(4, dtype=torch.bool), 2, 8)
    out = torch.full_like(chosen, -2)
    out[mine] = drop_choices_over_capacity(chosen[mine], at, MOE, (group, CommGroup("cp")))
    return out


def test_what_is_dropped_does_not_depend_on_the_ranks() -> None:
    chosen = torch.rand(16, E, generator=torch.Generator().manual_seed(3)).topk(2).indices
    row, place = torch.arange(2).repeat_interleave(8), torch.arange(8).repeat(2)
    at = RoutedTokens(row, place, torch.ones(16, dtype=torch.bool), 2, 8)
    alone = drop_choices_over_capacity(chosen, at, MOE, (CommGroup("tp"), CommGroup("cp")))
    parts = torch.stack(run_ranks(kept_by_ranks, 4, chosen)).amax(0)
    assert torch.equal(parts, alone)
    assert (alone < 0).any()
    for (first, stop), capacity in zip(pairwise(accumulate([8, 8], initial=0)), [2, 2], strict=True):
        assert torch.bincount(alone[first:stop].flatten() + 1, minlength=E + 1)[1:].max() <= capacity
