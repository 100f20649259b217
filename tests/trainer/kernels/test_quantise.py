"""Matrices of eight-bit floats: what they stand for, what a layout may do to their scales, and torch's product of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import ScalingType

from mega_trainer.kernels.fp8_kernels import (
    BLOCKS,
    E4M3,
    E5M2,
    MX,
    ceil_power_of_two,
    dequantize_matrix,
    quantize_matrix,
    rotate_blocks,
    round_to_nvfp4,
    scaled_gemm,
    swizzle_mx_scales,
)

BITS = {E4M3: 4, E5M2: 3}  # of a rounded number, the leading one included
RANGE = 2**13  # from the largest number to the smallest that keeps its bits, at least
PAIRS: list[tuple[ScalingType, ScalingType]] = [(kind, kind) for kind in BLOCKS if kind != ScalingType.BlockWise128x128]
PAIRS.append((ScalingType.BlockWise1x128, ScalingType.BlockWise128x128))


def numbers(*shape: int, dtype: torch.dtype = torch.float32, decades: float = 2) -> torch.Tensor:
    """Of sizes that differ between columns by so many powers of ten."""
    return (torch.randn(*shape) * torch.logspace(0, decades, shape[-1])).to(dtype)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("kind", BLOCKS)
def test_every_number_is_rounded_to_the_bits_of_its_format(kind: ScalingType, dtype: torch.dtype) -> None:
    x = numbers(256, 384)
    mantissa, exponent = torch.frexp(x)
    expected = torch.ldexp(torch.round(mantissa * 2 ** BITS[dtype]) / 2 ** BITS[dtype], exponent)
    in_range = x.abs() > x.abs().max() / RANGE
    found = dequantize_matrix(quantize_matrix(x, kind, dtype), torch.float32)
    assert torch.equal(found[in_range], expected[in_range])
    turned = quantize_matrix(x[:, :128].t().contiguous().t(), kind, dtype)
    assert turned.values.is_contiguous()
    assert torch.equal(
        dequantize_matrix(turned, torch.float32)[in_range[:, :128]], expected[:, :128][in_range[:, :128]]
    )


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_has_the_smallest_power_of_two_for_a_scale_that_holds_its_largest(kind: ScalingType) -> None:
    x, (rows, columns) = numbers(256, 256), BLOCKS[kind]
    scale = quantize_matrix(x, kind).scale
    rows, columns = rows or 256, columns or 256
    assert scale.shape == (256 // rows, 256 // columns)
    largest = x[:rows, -columns:].abs().max().item()
    assert scale[0, -1].item() == 2 ** math.ceil(math.log2(largest / 448))


@given(st.floats(2**-90, 2**90, width=32))
def test_the_power_of_two_above(x: float) -> None:
    above = ceil_power_of_two(torch.tensor([x])).item()
    assert math.frexp(above)[0] == 0.5
    assert above / 2 < x <= above


def test_zeros_and_what_is_no_number() -> None:
    x = torch.zeros(4, 32)
    assert not dequantize_matrix(quantize_matrix(x, MX), torch.float32).any()
    for bad in (float("nan"), float("inf")):
        x[1, 3] = bad
        assert not dequantize_matrix(quantize_matrix(x, MX), torch.float32)[1, 3].isfinite()


@pytest.mark.parametrize("kind", [ScalingType.TensorWise, ScalingType.RowWise])
def test_parts_with_scales_of_their_own_stand_for_the_same_numbers(kind: ScalingType) -> None:
    """But for those that fall below the range."""
    x = numbers(64, 64, decades=6)
    whole = dequantize_matrix(quantize_matrix(x, kind), torch.float32)
    parts = torch.cat([dequantize_matrix(quantize_matrix(part, kind), torch.float32) for part in x.chunk(2, 1)], 1)
    largest = x.abs().max() if kind == ScalingType.TensorWise else x.abs().amax(1, keepdim=True)
    in_range = x.abs() > largest / RANGE
    assert torch.equal(parts[in_range], whole[in_range])
    assert not torch.equal(parts, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_a_product_is_that_of_the_numbers(left: ScalingType, right: ScalingType, dtype: torch.dtype) -> None:
    a, b = quantize_matrix(numbers(128, 256), left, E5M2), quantize_matrix(numbers(256, 256), right)
    exact = dequantize_matrix(a, torch.float64) @ dequantize_matrix(b, torch.float64).t()
    y = scaled_gemm(a, b, dtype)
    assert y.dtype == dtype
    worst = (y.double() - exact).abs().max() / exact.abs().max()
    assert worst <= {torch.bfloat16: 2**-8, torch.float32: 1e-6, torch.float64: 1e-15}[dtype]


@pytest.mark.parametrize("gradients", [E4M3, E5M2])
@pytest.mark.parametrize("width", [128, 640])
@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_torch_takes_the_arguments_of_a_gpus_product(
    left: ScalingType, right: ScalingType, width: int, gradients: torch.dtype
) -> None:
    """Its check of meta tensors is that of a GPU: row and column order, sizes, the scales' shapes, strides and swizzle."""
    x, weight = (torch.empty(width, rows, dtype=torch.bfloat16, device="meta").t() for rows in (256, 512))
    y = scaled_gemm(quantize_matrix(x, left, gradients), quantize_matrix(weight, right), torch.bfloat16, fast=True)
    assert y.shape == (256, 512)


def test_the_order_of_mxfp8s_scales() -> None:
    rows, columns = 200, 6
    scale = torch.exp2(torch.randint(-20, 20, (rows, columns)).float())
    flat = swizzle_mx_scales(scale).float()
    assert flat.numel() == 256 * 8
    for row, column in ((0, 0), (31, 3), (32, 1), (127, 5), (128, 4), (199, 5)):
        tile = row // 128 * 2 + column // 4
        assert flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] == scale[row, column]


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_four_bits_are_the_nearest_of_their_block() -> None:
    x = numbers(64, 96)
    for rows in (1, 16):
        found = round_to_nvfp4(x, rows)
        assert torch.equal(round_to_nvfp4(found, rows), found)  # also after a prepared weight is rounded again
        assert torch.equal(round_to_nvfp4(x.bfloat16(), rows).float(), round_to_nvfp4(x.bfloat16().float(), rows))
        blocks, rounded = (t.view(64 // rows, rows, 6, 16).transpose(1, 2).flatten(2) for t in (x, found))
        scale = rounded.abs().amax(-1, keepdim=True) / 6
        largest = blocks.abs().amax(-1, keepdim=True) / 6
        assert ((scale - largest).abs() <= largest / 16).all()  # three bits behind the leading one
        assert torch.equal((scale.frexp()[0] * 16).frac(), torch.zeros_like(scale))
        errors = ((blocks.abs() / scale).unsqueeze(-1) - E2M1).abs().amin(-1) * scale
        torch.testing.assert_close((rounded - blocks).abs(), errors, rtol=1e-3, atol=1e-4)
    assert torch.equal(round_to_nvfp4(x.t(), 16), round_to_nvfp4(x, 16).t())  # one weight for both of its products


def test_zeros_and_nan_in_four_bits() -> None:
    x = torch.zeros(2, 32)
    assert not round_to_nvfp4(x).any()
    x[1, 3] = float("nan")
    assert round_to_nvfp4(x)[1, :16].isnan().all()


def test_rotated_factors_have_the_same_product_and_no_outliers() -> None:
    a, b = torch.randn(8, 64, dtype=torch.float64), torch.randn(6, 64, dtype=torch.float64)
    torch.testing.assert_close(rotate_blocks(a) @ rotate_blocks(b).t(), a @ b.t(), rtol=1e-12, atol=1e-12)
    outlier = torch.zeros(1, 16, dtype=torch.float64)
    outlier[0, 5] = 4
    assert torch.equal(rotate_blocks(outlier).abs(), torch.ones(1, 16, dtype=torch.float64))
