from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks

from mega_trainer.comm import Group
from mega_trainer.optim.clip import clip_factor, grad_norm, sum_of_squares
from mega_trainer.parallel.shared import Buffer, Kind, Shard


@pytest.mark.parametrize(("norm", "limit", "factor"), [(2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (7.0, 0.0, 1.0)])
def test_the_clip_makes_large_gradients_as_long_as_the_limit(norm: float, limit: float, factor: float) -> None:
    assert clip_factor(norm, limit) == pytest.approx(factor, rel=1e-5)


def buffer(values: list[float], data: Group, *, sharded: bool, replicas: tuple[Group, ...] = ()) -> Buffer:
    made, grads = Buffer(), torch.tensor(values)
    made.kind, made.sharded = Kind(data, (), replicas, True, False, torch.float32), sharded
    made.shards = [Shard(grads, grads, [])]
    return made


def norms() -> list[float]:
    """Over two ranks: the same gradient as slices and whole, a copy on both, and different parts of a model."""
    rank = dist.get_rank()
    both = Group("g", (0, 1), rank, dist.group.WORLD)
    slices, whole = [[3.0, 4.0], [12.0, 84.0]], [3.0, 4.0, 12.0, 84.0]
    return [
        grad_norm([buffer(slices[rank], both, sharded=True)], []).item(),
        grad_norm([buffer(whole, both, sharded=False)], []).item(),
        grad_norm([buffer(whole, Group("dp"), sharded=False, replicas=(both,))], [both]).item(),
        grad_norm([buffer(slices[rank], Group("dp"), sharded=False)], [both]).item(),
        grad_norm([buffer([math.inf if rank else 0.0], Group("dp"), sharded=False)], [both]).item(),
    ]


def test_each_element_counts_once_and_all_ranks_agree() -> None:
    first, second = run_ranks(norms, 2, timeout=60)
    assert first == second == [pytest.approx(math.sqrt(9 + 16 + 144 + 7056))] * 4 + [math.inf]
    assert first[0] == first[1]


@given(st.integers(0, 1000), st.integers(1, 300), st.sampled_from([torch.float32, torch.float64]), st.data())
def test_the_sum_is_right_to_the_last_digit_however_it_is_cut(seed: int, size: int, dtype, data) -> None:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=random).to(dtype) * 10.0 ** torch.randint(-9, 9, (size,), generator=random)
    before, cut = values.clone(), sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    parts = values[torch.randperm(size, generator=random)].tensor_split(cut)
    exact = float(sum(Fraction(x) for x in values.double().square().tolist()))
    assert sum_of_squares([values]).sum() == sum_of_squares(parts).sum() == exact
    assert torch.equal(values, before)
