"""Elementwise and row-wise work with its gradient by hand: each function is one leaf forward and one backward.

Nothing is kept for a backward but what a neighbouring product keeps anyway: a gate's input, the residual stream, and a number
a row. Legend: N tokens in any number of axes, D model width, F feed-forward width, H heads, d head size, r its rotated part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mega_trainer.kernels.base import Rotation
from mega_trainer.kernels.leaves import Leaves, recorded

SLOPE = 1.702  # of the gate in GPT-OSS, where its sigmoid is near gelu's
APPROXIMATE = {"geglu": "tanh", "geglu_erf": "none"}


# ------------------------------------------------------------------------------------------------------ gated activations


def gated_leaf(gate_up: Tensor, activation: str, limit: float | None) -> Tensor:
    """[N, 2F] -> [N, F]; see `Kernels.gated`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return torch.sigmoid(SLOPE * gate).mul_(gate).mul_(up + 1)
    return (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate=APPROXIMATE[activation])).mul_(up)


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
    dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate=APPROXIMATE[activation])
    return torch.cat([dgate, F.gelu(gate, approximate=APPROXIMATE[activation]).mul_(dy)], -1)


def weighted_leaf(gate_up: Tensor, weights: Tensor, activation: str, limit: float | None) -> Tensor:
    """`gated_leaf` of each row times its weight, [N] in at least fp32."""
    y = gated_leaf(gate_up, activation, limit)
    return y.mul_(weights.to(y.dtype).unsqueeze(-1))


def weighted_backward_leaf(
    dy: Tensor, gate_up: Tensor, weights: Tensor, activation: str, limit: float | None
) -> tuple[Tensor, Tensor]:
    """As `gated_backward_leaf`, and the gradient of the weights [N]."""
    dweights = (dy * gated_leaf(gate_up, activation, limit)).sum(-1, dtype=weights.dtype)
    return gated_backward_leaf(dy * weights.to(dy.dtype).unsqueeze(-1), gate_up, activation, limit), dweights


class _Gated(Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, weights: Tensor | None, activation: str, limit: float | None, leaves: Leaves
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.how, ctx.leaves = (activation, limit), leaves
        if weights is None:
            return leaves(gated_leaf, gate_up, activation, limit)
        return leaves(weighted_leaf, gate_up, weights, activation, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weights = ctx.saved_tensors
        if weights is None:
            return ctx.leaves(gated_backward_leaf, dy, gate_up, *ctx.how), None, None, None, None
        return *ctx.leaves(weighted_backward_leaf, dy, gate_up, weights, *ctx.how), None, None, None


def gated(gate_up: Tensor, weights: Tensor | None, activation: str, limit: float | None, leaves: Leaves) -> Tensor:
    """See `Kernels.gated`."""
    y: Tensor = recorded(_Gated, gate_up, weights, activation, limit, leaves)
    return y


# ------------------------------------------------------------------------------------------------------ residual and norm


def wide(x: Tensor) -> Tensor:
    """In at least fp32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def inverse_rms(x: Tensor, count: int | Tensor, eps: float | Tensor) -> Tensor:
    """[N, 1] of x [N, D = count]. Of a number torch makes a tensor at each call, which takes as long as the operation on few rows."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.mul_(length).div_(count).add_(eps).rsqrt_()


def rms_norm_leaf(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """The norm of x [N, D], and what each row was multiplied by, [N, 1] in at least fp32."""
    values = wide(x)
    scale = inverse_rms(values, x.shape[-1], eps)
    normed = (values * scale).mul_(_factor(weight, zero_centered))
    return normed if values is x else normed.to(x.dtype), scale


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
    along = torch.linalg.vecdot(product, factor).unsqueeze(-1) * scale.pow(3)
    out = (dvalues * factor).mul_(scale).addcmul_(values, along, value=-1 / x.shape[-1])
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
    stream, normed = recorded(_AddRmsNorm, x, y, weight, eps, zero_centered, leaves)
    return stream, normed


# -------------------------------------------------------------------------------------------------------- rotary embedding


def rotate_leaf(cos: Tensor, sin: Tensor, interleaved: bool, back: bool, turning: int, *parts: Tensor) -> Tensor:
    """Heads [B, S, H_i, d] in one tensor [B, S, sum H_i, d], the first `turning` of them rotated, or `back`.

    Interleaved, rotation takes pairs of neighbours to halves, and the way back halves to pairs.
    """
    sin, size = -sin if back else sin, 2 * cos.shape[-1]
    if torch.compiler.is_compiling():  # makes this one kernel, and would not the writing into parts of a tensor
        return torch.cat(list(_turned(cos, sin, interleaved, back, turning, parts)), -2)
    x = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x1, x2 = _sides(x[..., :turning, :size], interleaved and not back)
    y1, y2 = _sides(y[..., :turning, :size], interleaved and back)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin)
    if size < x.shape[-1]:
        y[..., :turning, size:] = x[..., :turning, size:]
    if turning < x.shape[-2]:
        y[..., turning:, :] = x[..., turning:, :]
    return y


def _turned(
    cos: Tensor, sin: Tensor, interleaved: bool, back: bool, turning: int, parts: Sequence[Tensor]
) -> Iterator[Tensor]:
    """The parts of `rotate_leaf`, those rotated that turn; a part that turns only in part comes as two."""
    for part in parts:
        own = min(turning, part.shape[-2])
        if own:
            yield _rotated(part[..., :own, :], cos, sin, interleaved, back)
        if own < part.shape[-2]:
            yield part[..., own:, :]
        turning -= own


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
        ctx.interleaved, ctx.leaves = interleaved, leaves
        ctx.turning = sum(heads[:turning])
        out = leaves(rotate_leaf, cos, sin, interleaved, False, ctx.turning, x)
        return torch.split(out, list(heads), -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dparts: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.leaves(rotate_leaf, *ctx.saved_tensors, ctx.interleaved, True, ctx.turning, *dparts)
        return dx, None, None, None, None, None, None


def rotate(x: Tensor, rotation: Rotation, heads: Sequence[int], turning: int, leaves: Leaves) -> tuple[Tensor, ...]:
    """x [B, S, H, d] cut into parts of so many `heads` each, of which the first `turning` are rotated.

    For a backward all parts are written anew: x need not be kept for the sake of one that does not turn.
    """
    if (
        not torch.is_grad_enabled()
        and not leaves.compiled
        and not rotation.interleaved
        and 2 * rotation.cos.shape[-1] == x.shape[-1]
    ):
        # in fewer operations, whose start takes longer than they do where there are few tokens
        cos, sin = rotation.whole
        turns, stays = torch.tensor_split(x, [sum(heads[:turning])], -2)
        turned = torch.addcmul(turns * cos, turns.roll(x.shape[-1] // 2, -1), sin)
        kept = [stays] if turning + 1 == len(heads) else stays.split_with_sizes(list(heads[turning:]), -2)
        return *turned.split_with_sizes(list(heads[:turning]), -2), *kept
    parts: tuple[Tensor, ...] = recorded(
        _Rotate, x, rotation.cos, rotation.sin, rotation.interleaved, heads, turning, leaves
    )
    return parts
