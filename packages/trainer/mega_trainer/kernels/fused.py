"""Elementwise and row-wise work with its gradient by hand: each function is one leaf forward and one backward.

Nothing is kept for a backward but what a neighbouring product keeps anyway: a gate's input, the residual stream, and a number
a row. Legend: N tokens in any number of axes, D model width, F feed-forward width, H heads, d head size, r its rotated part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mega_trainer.kernels.base import Rotation
from mega_trainer.kernels.leaves import Leaves

SLOPE = 1.702  # of the gate in GPT-OSS, where its sigmoid is near gelu's


# ------------------------------------------------------------------------------------------------------ gated activations


def gated_leaf(gate_up: Tensor, activation: str, limit: float | None) -> Tensor:
    """[N, 2F] -> [N, F]; see `Kernels.gated`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return torch.sigmoid(SLOPE * gate).mul_(gate).mul_(up + 1)
    return (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")).mul_(up)


def gated_backward_leaf(dy: Tensor, gate_up: Tensor, activation: str, limit: float | None) -> Tensor:
    """dy [N, F] -> the gradient of gate and up side by side [N, 2F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        inside = gate <= limit, up.abs() <= limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        share = torch.sigmoid(SLOPE * gate)
        dgate = dy * (up + 1) * share * (1 + SLOPE * gate * (1 - share))
        return torch.cat([dgate * inside[0], dy * gate * share * inside[1]], -1)
    if activation == "swiglu":
        return torch.cat([torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate).mul_(dy)], -1)
    dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh")
    return torch.cat([dgate, F.gelu(gate, approximate="tanh").mul_(dy)], -1)


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str, limit: float | None, leaves: Leaves) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.how, ctx.leaves = (activation, limit), leaves
        return leaves(gated_leaf, gate_up, activation, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.leaves(gated_backward_leaf, dy, *ctx.saved_tensors, *ctx.how), None, None, None


def gated(gate_up: Tensor, activation: str, limit: float | None, leaves: Leaves) -> Tensor:
    """See `Kernels.gated`."""
    y: Tensor = _Gated.apply(gate_up, activation, limit, leaves)  # type: ignore[no-untyped-call]
    return y


# ------------------------------------------------------------------------------------------------------ residual and norm


def wide(x: Tensor) -> Tensor:
    """In at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm_leaf(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """The norm of x [N, D], and what each row was multiplied by, [N, 1] in at least fp32."""
    values = wide(x)
    length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    scale = torch.rsqrt(length.square() / x.shape[-1] + eps)
    return (values * scale).mul_(_factor(weight, zero_centered)).to(x.dtype), scale


def add_rms_norm_leaf(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x + y, and as `rms_norm_leaf` of that."""
    total = x + y
    return total, *rms_norm_leaf(total, weight, eps, zero_centered)


def rms_norm_backward_leaf(
    dy: Tensor, dx: Tensor | None, x: Tensor, scale: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of x [N, D], to which `dx` that came to it otherwise is added, and of the weight [D]."""
    dvalues, values, factor = wide(dy), wide(x), _factor(weight, zero_centered)
    product = dvalues * values
    dweight = (product * scale).sum(tuple(range(x.dim() - 1)))
    along = (product * factor).sum(-1, keepdim=True) * scale**3 / x.shape[-1]
    out = (dvalues * factor).mul_(scale).addcmul_(values, along, value=-1)
    if dx is not None:
        out = out.add_(dx)
    return out.to(x.dtype), dweight.to(weight.dtype)


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    return 1 + wide(weight) if zero_centered else wide(weight)


class _AddRmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, zero_centered: bool, leaves: Leaves
    ) -> tuple[Tensor, Tensor]:
        if y is None:
            normed, scale = leaves(rms_norm_leaf, x, weight, eps, zero_centered)
        else:
            x, normed, scale = leaves(add_rms_norm_leaf, x, y, weight, eps, zero_centered)
        ctx.save_for_backward(x, scale, weight)
        ctx.zero_centered, ctx.leaves, ctx.added = zero_centered, leaves, y is not None
        ctx.set_materialize_grads(False)
        return x, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dx, dx if ctx.added else None, None, None, None, None
        out, dweight = ctx.leaves(rms_norm_backward_leaf, dy, dx, *ctx.saved_tensors, ctx.zero_centered)
        return out, out if ctx.added else None, dweight, None, None, None


def add_rms_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, zero_centered: bool, leaves: Leaves
) -> tuple[Tensor, Tensor]:
    """See `Kernels.add_rms_norm`."""
    stream, normed = _AddRmsNorm.apply(x, y, weight, eps, zero_centered, leaves)  # type: ignore[no-untyped-call]
    return stream, normed


# -------------------------------------------------------------------------------------------------------- rotary embedding


def rotate_leaf(cos: Tensor, sin: Tensor, interleaved: bool, back: bool, turning: int, *parts: Tensor) -> Tensor:
    """Heads [B, S, H_i, d] in one tensor [B, S, sum H_i, d], the first `turning` of the parts rotated, or `back`.

    Interleaved, rotation takes pairs of neighbours to halves, and the way back halves to pairs.
    """
    size, sin = 2 * cos.shape[-1], -sin if back else sin
    if torch.compiler.is_compiling():  # makes this one kernel, and would not the writing into parts of a tensor
        return torch.cat([_rotated(x, cos, sin, interleaved, back) for x in parts[:turning]] + [*parts[turning:]], -2)
    heads = [x.shape[-2] for x in parts]
    out = parts[0].new_empty(*parts[0].shape[:-2], sum(heads), parts[0].shape[-1])
    for index, (x, y) in enumerate(zip(parts, torch.split(out, heads, -2), strict=True)):
        kept = size if index < turning else 0
        if kept:
            x1, x2 = _sides(x[..., :size], interleaved and not back)
            y1, y2 = _sides(y[..., :size], interleaved and back)
            torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1)
            torch.mul(x2, cos, out=y2).addcmul_(x1, sin)
        y[..., kept:] = x[..., kept:]
    return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    size = 2 * cos.shape[-1]
    x1, x2 = _sides(x[..., :size], interleaved and not back)
    sides = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    turned = torch.stack(sides, -1).flatten(-2) if interleaved and back else torch.cat(sides, -1)
    return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], -1)


def _sides(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    """Two views of x [.., r], each [.., r/2]: the firsts and the seconds of its pairs, or its halves."""
    if pairs:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


class _Rotate(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        heads: Sequence[int],
        turning: int,
        leaves: Leaves,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.turning, ctx.leaves = interleaved, turning, leaves
        alike = [sum(heads[:turning]), *heads[turning:]]
        out = leaves(rotate_leaf, cos, sin, interleaved, False, 1, *torch.split(x, alike, -2))
        return torch.split(out, list(heads), -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dparts: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.leaves(rotate_leaf, *ctx.saved_tensors, ctx.interleaved, True, ctx.turning, *dparts)
        return dx, None, None, None, None, None, None


def rotate(x: Tensor, rotation: Rotation, heads: Sequence[int], turning: int, leaves: Leaves) -> tuple[Tensor, ...]:
    """x [B, S, H, d] cut into parts of so many `heads` each, of which the first `turning` are rotated.

    All parts are written anew: x need not be kept for the sake of one that does not turn.
    """
    parts: tuple[Tensor, ...] = _Rotate.apply(  # type: ignore[no-untyped-call]
        x, rotation.cos, rotation.sin, rotation.interleaved, heads, turning, leaves
    )
    return parts
