"""Leaves with gradients by hand, against the plain composition of torch's operations and its autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.kernels.kernel_interface import RotaryAngles
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.kernels.torch_kernels import TorchKernels

KERNELS = TorchKernels()
Both = tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]], list[tuple[int, ...]]]


def gated(activation: str, limit: float | None) -> Both:
    def plain(x: Tensor) -> tuple[Tensor, ...]:
        gate, up = x.chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return (gate * torch.sigmoid(1.702 * gate) * (up + 1),)
        return ((F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up,)

    return lambda x: (KERNELS.gated_activation(x, activation, limit),), plain, [(3, 5, 12)]


def weighted(activation: str, limit: float | None) -> Both:
    plain = gated(activation, limit)[1]
    return (
        lambda x, weights: (KERNELS.gated_activation(x, activation, limit, weights),),
        lambda x, weights: (plain(x)[0] * weights.unsqueeze(-1),),
        [(7, 12), (7,)],
    )


def norm(*, added: bool, zero_centered: bool) -> Both:
    def plain(x: Tensor, weight: Tensor, *y: Tensor) -> tuple[Tensor, ...]:
        total = x + y[0] if added else x
        return total, F.rms_norm(total, (8,), 1 + weight if zero_centered else weight, 1e-3)

    def ours(x: Tensor, weight: Tensor, *y: Tensor) -> tuple[Tensor, ...]:
        return KERNELS.add_rms_norm(x, *(y or [None]), weight, 1e-3, zero_centered=zero_centered)

    return ours, plain, [(2, 5, 8), (8,), *[(2, 5, 8)] * added]


def rotated(fraction: float, *, interleaved: bool, fused: bool) -> Both:
    angle = torch.linspace(0, 3, 5 * int(4 * fraction), dtype=torch.float64).view(1, 5, 1, -1)

    def turn(x: Tensor) -> RotaryAngles:
        return RotaryAngles(angle.cos().to(x.dtype), angle.sin().to(x.dtype), interleaved)

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.split([4, 2, 2], -2)
        return _turned(q, turn(x)), _turned(k, turn(x)), v

    def ours(x: Tensor) -> tuple[Tensor, ...]:
        if fused:
            return KERNELS.apply_rotary_qkv(x, turn(x), 4, 2)
        return (
            KERNELS.apply_rotary(x[..., :4, :], turn(x)),
            KERNELS.apply_rotary(x[..., 4:6, :], turn(x)),
            x[..., 6:, :],
        )

    return ours, plain, [(2, 5, 8, 8)]


def _turned(x: Tensor, turn: RotaryAngles) -> Tensor:
    size = 2 * turn.cos.shape[-1]
    x1, x2 = (x[..., :size:2], x[..., 1:size:2]) if turn.interleaved else x[..., :size].chunk(2, -1)
    return torch.cat([x1 * turn.cos - x2 * turn.sin, x2 * turn.cos + x1 * turn.sin, x[..., size:]], -1)


CASES = {
    "swiglu": gated("swiglu", None),
    "geglu": gated("geglu", None),
    "limited": gated("swiglu", 0.5),
    "swiglu of weighted rows": weighted("swiglu", None),
    "limited, of weighted rows": weighted("swiglu", 0.5),
    "norm": norm(added=False, zero_centered=False),
    "residual and norm": norm(added=True, zero_centered=False),
    "residual and Gemma's norm": norm(added=True, zero_centered=True),
    "rotation": rotated(1.0, interleaved=False, fused=True),
    "rotation of pairs": rotated(1.0, interleaved=True, fused=True),
    "rotation of a part": rotated(0.5, interleaved=True, fused=True),
    "rotation of views": rotated(0.5, interleaved=False, fused=False),
}


def both_ways(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor]) -> list[Tensor]:
    """What it returns, and the gradients of a sum that weighs every element otherwise."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outs = function(*leaves)
    total = sum((y.double() * torch.linspace(-1, 1, y.numel()).view_as(y).double()).sum() for y in outs)
    assert isinstance(total, Tensor)
    return [*outs, *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_is_the_plain_composition(name: str, dtype: torch.dtype, bound: float) -> None:
    """In bf16, against the composition in fp64 of the same rounded inputs."""
    ours, plain, shapes = CASES[name]
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
    for found, expected in zip(both_ways(ours, inputs), both_ways(plain, [x.double() for x in inputs]), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    ours, _, shapes = CASES[name]
    g = torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(ours, inputs, fast_mode=True)


@pytest.mark.long
def test_compiled_it_is_the_same_in_one_kernel_for_any_number_of_rows() -> None:
    """To rounding, for compiled code keeps in fp32 what is else rounded between operations; in graphs without a break."""
    torch._dynamo.utils.counters.clear()
    compiled, g = TorchKernels(FusibleFunctionCompiler(compiled=True)), torch.Generator().manual_seed(2)
    angle = torch.linspace(0, 3, 3 * 4).view(1, 3, 1, 4)
    turn = RotaryAngles(angle.cos(), angle.sin())
    for rows in (5, 2, 3, 4, 6):
        inputs = [torch.randn(shape, generator=g) for shape in [(rows, 16), (rows, 8), (8,), (rows, 3, 4, 8)]]

        def layer(kernels: TorchKernels, x: Tensor, y: Tensor, weight: Tensor, qkv: Tensor) -> tuple[Tensor, ...]:
            rotated = kernels.apply_rotary_qkv(qkv, turn, 2, 1)
            return *rotated, *kernels.add_rms_norm(kernels.gated_activation(x, "swiglu"), y, weight, 1e-3)

        plain, found = (both_ways(partial(layer, kernels), inputs) for kernels in (KERNELS, compiled))
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    # six leaves: once for the first number of rows, once for any
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 12
    assert not torch._dynamo.utils.counters["graph_break"]
