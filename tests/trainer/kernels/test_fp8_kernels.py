"""The back end of fp8 against products of what its factors stand for, and what a GPU is asked for."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.kernels.fp8_kernels import E4M3, E5M2, KINDS, Fp8Kernels, Nvfp4Kernels, round_to_nvfp4
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.kernels.torch_kernels import TorchKernels

TORCH = TorchKernels()


def rounded(x: Tensor, bits: int) -> Tensor:
    """To so many bits, as fp8 rounds what is in its range, whatever the scale."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent)


def factors(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Numbers of about one, so that none leaves the range."""
    return [(torch.rand(shape) + 0.25).mul(torch.randn(shape).sign()).bfloat16() for shape in shapes]


def close(mine: Tensor, reference: Tensor) -> None:
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine.float(), reference, rtol=0.01, atol=0.01 * reference.abs().max().item())


@pytest.mark.parametrize("gradients", [E4M3, E5M2])
@pytest.mark.parametrize("recipe", KINDS)
def test_each_product_is_that_of_rounded_factors(recipe: str, gradients: torch.dtype) -> None:
    """Near enough that factors rounded in another way would show."""
    kernels, bits = Fp8Kernels(recipe, gradients), 3 if gradients == E5M2 else 4
    x, weight, dy, bias = factors((2, 128, 256), (384, 256), (2, 128, 384), (384,))
    x8, w8, dy8 = rounded(x, 4), rounded(weight, 4), rounded(dy, bits)
    close(kernels.linear_forward(x, weight, bias), F.linear(x8, w8, bias.float()))
    given = kernels.prepare_gradient(dy)
    close(kernels.linear_dgrad(given, weight), dy8 @ w8)
    dw = torch.einsum("bsn,bsd->nd", dy8, x8)
    close(kernels.linear_wgrad(given, x), dw)
    out = torch.ones(384, 256)
    assert kernels.linear_wgrad(given, x, out, add=True) is out
    close((out - 1).bfloat16(), dw)


def test_products_in_four_bits() -> None:
    """Those of rounded factors; the weight gradient, whose factors are rotated first, is near the exact one."""
    kernels = Nvfp4Kernels()
    x, weight, dy, bias = factors((2, 128, 256), (384, 256), (2, 128, 384), (384,))
    w4, made, given = round_to_nvfp4(weight, 16), kernels.prepare_weight(weight), kernels.prepare_gradient(dy)
    for factor in (weight, made):
        assert torch.equal(kernels.linear_forward(x, factor, bias), F.linear(round_to_nvfp4(x), w4, bias))
        assert torch.equal(kernels.linear_dgrad(given, factor), round_to_nvfp4(dy) @ w4)
    exact, out = torch.einsum("bsn,bsd->nd", dy.float(), x.float()), torch.ones(384, 256)
    assert kernels.linear_wgrad(given, x, out, add=True) is out
    assert ((out - 1) - exact).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_scales_go_along_the_axis_that_is_summed_over(recipe: str) -> None:
    """Each row of a product stands apart by a factor that would leave the range of its neighbors' scales."""
    kernels = Fp8Kernels(recipe)
    x, weight, dy = factors((64, 96), (128, 96), (64, 128))

    def far(n: int) -> Tensor:
        return torch.exp2(torch.arange(n) % 32 * 2.0 - 32).bfloat16()

    tokens, outputs, inputs = far(64), far(128), far(96)
    y = kernels.linear_forward(x * tokens[:, None], weight * outputs[:, None])
    assert torch.equal(y / tokens[:, None] / outputs, kernels.linear_forward(x, weight))
    plain, rows, columns = (kernels.prepare_gradient(t) for t in (dy, dy * tokens[:, None], dy * outputs))
    dx = kernels.linear_dgrad(rows, weight * inputs)
    assert torch.equal(dx / tokens[:, None] / inputs, kernels.linear_dgrad(plain, weight))
    dw = kernels.linear_wgrad(columns, x * inputs)
    assert torch.equal(dw / outputs[:, None] / inputs, kernels.linear_wgrad(plain, x))


@pytest.mark.parametrize("recipe", KINDS)
def test_a_prepared_weight_is_the_weight(recipe: str) -> None:
    """To the bit, for both of its products, and so are those of groups."""
    kernels, rows = Fp8Kernels(recipe), GroupedRows.from_counts([3, 125], torch.device("cpu"))
    x, weight, dy, experts = factors((128, 256), (384, 256), (128, 384), (2, 384, 256))
    made, given = kernels.prepare_weight(weight), kernels.prepare_gradient(dy)
    assert torch.equal(kernels.linear_forward(x, made), kernels.linear_forward(x, weight))
    assert torch.equal(kernels.linear_dgrad(given, made), kernels.linear_dgrad(given, weight))
    made = kernels.prepare_grouped_weight(experts)
    assert torch.equal(kernels.grouped_linear(x, made, rows), kernels.grouped_linear(x, experts, rows))
    assert torch.equal(kernels.grouped_dgrad(dy, made, rows), kernels.grouped_dgrad(dy, experts, rows))


@pytest.mark.parametrize("recipe", KINDS)
def test_rows_and_their_groups(recipe: str) -> None:
    rows = GroupedRows.from_counts([3, 0, 130, 1], torch.device("cpu"))
    x, dy, weight = factors((134, 256), (134, 128), (4, 128, 256))
    kernels = Fp8Kernels(recipe, E5M2)
    close(kernels.grouped_linear(x, weight, rows), TORCH.grouped_linear(rounded(x, 4), rounded(weight, 4), rows))
    close(kernels.grouped_dgrad(dy, weight, rows), TORCH.grouped_dgrad(rounded(dy, 4), rounded(weight, 4), rows))
    assert torch.equal(kernels.grouped_wgrad(dy, x, rows), TORCH.grouped_wgrad(dy, x, rows))
    none = GroupedRows.from_counts([0, 0, 0, 0], torch.device("cpu"))
    assert kernels.grouped_linear(x[:0], weight, none).shape == (0, 128)


@pytest.mark.parametrize("recipe", KINDS)
def test_a_gpu_is_asked_for_what_torch_declares(recipe: str) -> None:
    """Torch's check of meta tensors is that of a GPU."""
    kernels = Fp8Kernels(recipe, E5M2)
    with torch.device("meta"):
        x, weight, dy = (torch.empty(size, dtype=torch.bfloat16) for size in ((2, 128, 256), (384, 256), (2, 128, 384)))
        out = torch.empty(384, 256)
    assert kernels.linear_forward(x, weight).shape == dy.shape
    given, made = kernels.prepare_gradient(dy), kernels.prepare_weight(weight)
    assert kernels.linear_forward(x, made).shape == dy.shape
    assert kernels.linear_dgrad(given, weight).shape == kernels.linear_dgrad(given, made).shape == x.shape
    assert kernels.linear_wgrad(given, x, out, add=True) is out


@pytest.mark.parametrize("recipe", KINDS)
def test_fast_accumulation_is_requested_only_for_scales_of_tensors_and_rows(recipe: str) -> None:
    """Torch raises an error on Hopper for block scales with it, which its check of meta tensors does not show."""
    with torch.device("meta"):
        x, weight = torch.empty(128, 256, dtype=torch.bfloat16), torch.empty(384, 256, dtype=torch.bfloat16)
    with mock.patch.object(F, "scaled_mm", return_value=x) as gemm:
        Fp8Kernels(recipe).linear_forward(x, weight)
    assert gemm.call_args.kwargs["use_fast_accum"] == (recipe in ("tensorwise", "rowwise"))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_gpu_is_asked_for_groups_as_torch_declares_them(recipe: str) -> None:
    """The older name of the operation has that check, with the same arguments but for the kinds of the scales."""

    def older(
        a: Tensor, b: Tensor, scale_a: Tensor, kind_a: object, scale_b: Tensor, kind_b: object, **more: object
    ) -> Tensor:
        assert (kind_a, kind_b) == KINDS["rowwise"]
        y: Tensor = torch._scaled_grouped_mm(
            a,
            b,
            scale_a,
            scale_b,
            offs=more["offs"],
            out_dtype=more["output_dtype"],
            use_fast_accum=more["use_fast_accum"],
        )
        return y

    with torch.device("meta"):
        x, weight, dy = (torch.empty(size, dtype=torch.bfloat16) for size in ((100, 256), (4, 128, 256), (100, 128)))
        rows = GroupedRows(torch.empty(4, dtype=torch.int32))
    with mock.patch.object(F, "scaled_grouped_mm", older):
        assert Fp8Kernels(recipe).grouped_linear(x, weight, rows).shape == dy.shape
        assert Fp8Kernels(recipe).grouped_dgrad(dy, weight, rows).shape == x.shape
