from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from mega_common.errors import ConfigError
from mega_trainer.config.sections import Fp16Config
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.optim.gradient_clipping import (
    WIDTHS,
    LossScale,
    compute_grad_norm,
    gradient_clip_factor,
    sum_of_squares,
)
from mega_trainer.parallel.parameter_shards import GatheredShardLayout, ParameterBuffer, ParameterShard, ParamGroupKey

PLAIN = FusibleFunctionCompiler()


@pytest.mark.parametrize(("norm", "limit", "factor"), [(2.0, 1.0, 0.5), (0.5, 1.0, 1.0), (7.0, 0.0, 1.0)])
def test_the_clip_makes_large_gradients_as_long_as_the_limit(norm: float, limit: float, factor: float) -> None:
    assert gradient_clip_factor(norm, limit) == pytest.approx(factor, rel=1e-5)


def buffer(
    values: list[float], data: CommGroup, *, sharded: bool, replicas: tuple[CommGroup, ...] = ()
) -> ParameterBuffer:
    made, grads = ParameterBuffer(), torch.tensor(values)
    made.kind, made.sharded = ParamGroupKey(data, (), replicas, True, False, torch.float32), sharded
    made.shards = [ParameterShard(grads, grads, [], GatheredShardLayout(len(grads), {}))]
    return made


def norms() -> list[float]:
    """Over two ranks: the same gradient as slices and whole, a copy on both, and different parts of a model."""
    rank = dist.get_rank()
    both = CommGroup("g", (0, 1), rank, dist.group.WORLD)
    slices, whole = [[3.0, 4.0], [12.0, 84.0]], [3.0, 4.0, 12.0, 84.0]
    return [
        compute_grad_norm([buffer(slices[rank], both, sharded=True)], [], PLAIN).item(),
        compute_grad_norm([buffer(whole, both, sharded=False)], [], PLAIN).item(),
        compute_grad_norm([buffer(whole, CommGroup("dp"), sharded=False, replicas=(both,))], [both], PLAIN).item(),
        compute_grad_norm([buffer(slices[rank], CommGroup("dp"), sharded=False)], [both], PLAIN).item(),
        compute_grad_norm([buffer([math.inf if rank else 0.0], CommGroup("dp"), sharded=False)], [both], PLAIN).item(),
    ]


def test_each_element_counts_once_and_all_ranks_agree() -> None:
    first, second = run_ranks(norms, 2, timeout=60)
    assert first == second == [pytest.approx(math.sqrt(9 + 16 + 144 + 7056))] * 4 + [math.inf]
    assert first[0] == first[1]


CUTS = st.lists(st.integers(0, 10_000), max_size=4).map(sorted)
WIDTHS_TO_TRY = st.sampled_from([WIDTHS["cpu"], (1, 1), (1, 3), (2, 4)])


@given(st.integers(0, 1000), st.integers(1, 300), CUTS, st.sampled_from([torch.float32, torch.float64]), WIDTHS_TO_TRY)
def test_the_sum_is_right_to_the_last_digit_however_it_is_cut(seed: int, size: int, cuts, dtype, widths) -> None:
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=random).to(dtype) * 10.0 ** torch.randint(-9, 9, (size,), generator=random)
    before = values.clone()
    parts = values[torch.randperm(size, generator=random)].tensor_split([cut * size // 10_000 for cut in cuts])
    exact = math.fsum(values.double().square().tolist())
    with mock.patch.dict(WIDTHS, cpu=widths):
        assert sum_of_squares([values], PLAIN).sum() == sum_of_squares(parts, PLAIN).sum() == exact
    assert torch.equal(values, before)


@settings(max_examples=20)
@given(CUTS, st.sampled_from([torch.float32, torch.float64]))
def test_a_sum_over_more_than_a_block_is_right_to_the_last_digit(cuts: list[int], dtype: torch.dtype) -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(1)).to(dtype)
    with mock.patch.dict(WIDTHS, cpu=(1, 8)):
        assert sum_of_squares(values.tensor_split(cuts), PLAIN).sum() == math.fsum(values.double().square().tolist())


@pytest.mark.parametrize("size", [1, 63, 64, 5000])
def test_a_number_that_is_not_finite_makes_the_norm_so_and_one_too_small_to_square_in_fp32_counts(size: int) -> None:
    def norm(value: float) -> float:
        return compute_grad_norm(
            [buffer([0.0] * (size - 1) + [value], CommGroup("dp"), sharded=False)], [], PLAIN
        ).item()

    assert norm(0.0) == 0.0
    assert norm(1e-44) == torch.tensor(1e-44).double().item()
    assert norm(3e38) == torch.tensor(3e38).double().item()
    assert norm(-math.inf) == math.inf
    assert math.isnan(norm(math.nan))


def test_the_sum_is_the_same_to_the_bit_compiled() -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        sum_of_squares([values], FusibleFunctionCompiler(compiled=True)), sum_of_squares([values], PLAIN)
    )


def test_it_halves_on_overflow_down_to_its_minimum() -> None:
    scale = LossScale(value=8.0, minimum=4.0)
    values = []
    for _ in range(3):
        scale.update_scale(overflowed=True)
        values.append(scale.value)
    assert values == [4.0, 4.0, 4.0]


def test_it_doubles_after_good_steps_in_a_row() -> None:
    scale = LossScale(value=8.0, growth_interval=3)
    values = []
    for overflowed in [False, False, True, False, False, False, False, False, False]:
        scale.update_scale(overflowed=overflowed)
        values.append(scale.value)
    assert values == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0]


@pytest.mark.parametrize(
    ("loss_finite", "norm_finite", "value", "mends"),
    [(True, False, 8.0, True), (True, False, 4.0, False), (False, False, 8.0, False), (True, True, 8.0, False)],
)
def test_only_a_gradient_that_overflows_is_mended(loss_finite, norm_finite, value, mends) -> None:
    assert (
        LossScale(value=value, minimum=4.0).can_fix_overflow(loss_finite=loss_finite, norm_finite=norm_finite) is mends
    )


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"initial_scale": 1000.0}, "initial_scale"),
        ({"min_scale": 0.0}, "min_scale"),
        ({"min_scale": 131072.0}, "initial_scale"),
    ],
)
def test_scales_are_powers_of_two_in_order(section, key) -> None:
    with pytest.raises(ConfigError, match=key):
        Fp16Config.parse(section)
