"""Collectives: what they compute, what they count, and that a group of one does nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import run_ranks

from mega_trainer.distributed.comm import (
    CommGroup,
    CommTrafficCounter,
    all_gather,
    all_gather_into,
    all_reduce,
    all_to_all,
    reduce_scatter,
    reduce_scatter_into,
    start_ring_transfer,
)

RANKS = 4


def world(*, ordered: bool = False, log: CommTrafficCounter | None = None) -> CommGroup:
    return CommGroup("world", tuple(range(RANKS)), dist.get_rank(), dist.group.WORLD, ordered, log)


def numbered(rank: int, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) + 100 * rank).view(shape)


def collectives() -> dict[str, Any]:
    rank, log = dist.get_rank(), CommTrafficCounter()
    out: dict[str, Any] = {}
    for ordered in (False, True):
        group = world(ordered=ordered, log=log)
        x = numbered(rank, 8, 3)
        total = x.clone()
        all_reduce(total, group)
        out[f"sum {ordered}"] = total
        later = x.clone()
        work = all_reduce(later, group, async_op=True)
        if work is not None:
            work.wait()
        out[f"later {ordered}"] = later
        for dim in (0, 1):
            cut = numbered(rank, 8, 3) if dim == 0 else numbered(rank, 2, 8, 3)
            out[f"scatter {dim} {ordered}"] = reduce_scatter(cut, group, dim)
    top = numbered(rank, 3)
    all_reduce(top, world(), "max")
    out["max"] = top
    out["gather 0"], out["gather 1"] = (all_gather(numbered(rank, 2, 3), world(), dim) for dim in (0, 1))
    # rank r sends s + 1 rows to each rank s
    rows = numbered(rank, 10, 2)
    out["all to all"] = all_to_all(rows, world(), [rank + 1] * RANKS, [1, 2, 3, 4])
    passing = start_ring_transfer(numbered(rank, 2, 3), world())
    out["sent"], out["passed"] = passing.sent, passing.wait()
    return {name: value.tolist() for name, value in out.items()}


def test_what_collectives_compute() -> None:
    inputs = [numbered(rank, 8, 3) for rank in range(RANKS)]
    total, wide = sum(inputs), sum(numbered(rank, 2, 8, 3) for rank in range(RANKS))
    assert isinstance(total, torch.Tensor)
    assert isinstance(wide, torch.Tensor)
    for rank, found in enumerate(run_ranks(collectives, RANKS)):
        for ordered in (False, True):
            assert found[f"sum {ordered}"] == found[f"later {ordered}"] == total.tolist()
            assert found[f"scatter 0 {ordered}"] == total.chunk(RANKS)[rank].tolist()
            assert found[f"scatter 1 {ordered}"] == wide.chunk(RANKS, 1)[rank].tolist()
        assert found["max"] == numbered(RANKS - 1, 3).tolist()
        pieces = [numbered(other, 2, 3) for other in range(RANKS)]
        assert found["gather 0"] == torch.cat(pieces).tolist()
        assert found["gather 1"] == torch.cat(pieces, 1).tolist()
        sent = [numbered(other, 10, 2).split([1, 2, 3, 4])[rank] for other in range(RANKS)]
        assert found["all to all"] == torch.cat(sent).tolist()
        assert found["sent"] == numbered(rank, 2, 3).tolist()
        assert found["passed"] == numbered((rank - 1) % RANKS, 2, 3).tolist()


LARGE = [1e16, 1.0, -1e16, 1.0]  # ((1e16 + 1) - 1e16) + 1 = 1 in rank order; 0 or 2 in others


def ordered_sums() -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    x = torch.full((RANKS,), LARGE[rank], dtype=torch.float64)
    part, total = reduce_scatter(x, world(ordered=True)), x.clone()
    all_reduce(total, world(ordered=True))
    return total.tolist(), part.tolist()


def test_ordered_sums_are_in_rank_order() -> None:
    for total, part in run_ranks(ordered_sums, RANKS):
        assert total == [1.0] * RANKS
        assert part == [1.0]


def counted() -> dict[tuple[str, str], list[int]]:
    log = CommTrafficCounter()
    group = world(log=log)
    all_reduce(torch.zeros(5), group)
    all_reduce(torch.zeros(3, dtype=torch.bfloat16), group)
    all_gather(torch.zeros(2, 3), group, 1)
    reduce_scatter(torch.zeros(8), group)
    all_to_all(torch.zeros(4, 2), group, [1] * 4, [1] * 4)
    start_ring_transfer(torch.zeros(7), group).wait()
    all_reduce(torch.zeros(5), CommGroup("world", log=log))
    return log.counts


def test_calls_and_bytes_are_counted() -> None:
    for counts in run_ranks(counted, RANKS):
        assert counts == {
            ("world", "all_reduce"): [2, 5 * 4 + 3 * 2],
            ("world", "all_gather"): [1, 4 * 2 * 3 * 4],
            ("world", "reduce_scatter"): [1, 8 * 4],
            ("world", "all_to_all"): [1, 4 * 2 * 4],
            ("world", "pass"): [1, 7 * 4],
        }


def test_a_group_of_one_does_nothing() -> None:
    log = CommTrafficCounter()
    alone, x = CommGroup("tp", log=log), torch.arange(6.0).view(2, 3)
    assert all_reduce(x, alone, async_op=True) is None
    assert all_gather(x, alone) is x
    assert reduce_scatter(x, alone, 1) is x
    assert all_to_all(x, alone, [2], [2]) is x
    for into in (all_gather_into, reduce_scatter_into):
        out = torch.zeros(2, 3)
        assert into(out, x, alone) is None
        assert torch.equal(out, x)
        assert into(x, x, alone) is None
    assert not log.counts
