"""Fused elementwise and row-wise operations with hand-written gradients: each is one leaf forward and one backward.

A backward needs only tensors that a neighboring GEMM saves anyway (a gate's input, the residual stream), and a number per
row. It is not `once_differentiable`: the check costs as much host time as a small operation, and no second derivative is taken.

Legend: N tokens in any number of axes, D model width, F feed-forward width, H heads, d head size, r its rotated part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from mega_trainer.kernels.kernel_interface import RotaryAngles
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler, apply_autograd_function

SLOPE = 1.702  # of the gate in GPT-OSS, whose sigmoid approximates GELU
APPROXIMATE = {"geglu": "tanh", "geglu_erf": "none"}


# ------------------------------------------------------------------------------------------------------ gated activations


def fusible_gated_activation(gate_up: Tensor, activation: str, limit: float | None) -> Tensor:
    """Return act(gate) * up of `gate_up` [N, 2F] (gate, then up), as [N, F]; see `Kernels.gated_activation`."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if activation == "clamped_swiglu":
            return F.silu(gate).mul_(up)
        return torch.sigmoid(SLOPE * gate).mul_(gate).mul_(up + 1)
    if activation == "reglu2":
        return F.relu(gate).square_().mul_(up)
    return (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate=APPROXIMATE[activation])).mul_(up)


def fusible_gated_activation_backward(dy: Tensor, gate_up: Tensor, activation: str, limit: float | None) -> Tensor:
    """Return the gradient of `gate_up` [N, 2F], gate then up, for `fusible_gated_activation`, from dy [N, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        inside = gate <= limit, up.abs() <= limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if activation == "clamped_swiglu":
            dgate = torch.ops.aten.silu_backward(dy * up, gate)
            return torch.cat([dgate * inside[0], F.silu(gate).mul_(dy) * inside[1]], -1)
        share = torch.sigmoid(SLOPE * gate)
        dgate = dy * (up + 1) * share * (1 + SLOPE * gate * (1 - share))
        return torch.cat([dgate * inside[0], dy * gate * share * inside[1]], -1)
    if activation == "reglu2":
        positive = F.relu(gate)
        return torch.cat([2 * positive * up * dy, positive.square() * dy], -1)
    if activation == "swiglu":
        return torch.cat([torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate).mul_(dy)], -1)
    dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate=APPROXIMATE[activation])
    return torch.cat([dgate, F.gelu(gate, approximate=APPROXIMATE[activation]).mul_(dy)], -1)


def fusible_weighted_activation(gate_up: Tensor, weights: Tensor, activation: str, limit: float | None) -> Tensor:
    """Return `fusible_gated_activation` with each token's row multiplied by its weight, [N] in at least fp32."""
    y = fusible_gated_activation(gate_up, activation, limit)
    return y.mul_(weights.to(y.dtype).unsqueeze(-1))


def fusible_weighted_activation_backward(
    dy: Tensor, gate_up: Tensor, weights: Tensor, activation: str, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate_up` [N, 2F] and weights [N] for `fusible_weighted_activation`, from dy [N, F]."""
    dweights = (dy * fusible_gated_activation(gate_up, activation, limit)).sum(-1, dtype=weights.dtype)
    return fusible_gated_activation_backward(
        dy * weights.to(dy.dtype).unsqueeze(-1), gate_up, activation, limit
    ), dweights


class _GatedActivation(Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        weights: Tensor | None,
        activation: str,
        limit: float | None,
        leaves: FusibleFunctionCompiler,
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.how, ctx.leaves = (activation, limit), leaves
        if weights is None:
            return leaves(fusible_gated_activation, gate_up, activation, limit)
        return leaves(fusible_weighted_activation, gate_up, weights, activation, limit)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weights = ctx.saved_tensors
        if weights is None:
            return ctx.leaves(fusible_gated_activation_backward, dy, gate_up, *ctx.how), None, None, None, None
        return *ctx.leaves(fusible_weighted_activation_backward, dy, gate_up, weights, *ctx.how), None, None, None


def gated_activation(
    gate_up: Tensor, weights: Tensor | None, activation: str, limit: float | None, leaves: FusibleFunctionCompiler
) -> Tensor:
    """Return act(gate) * up, rows times `weights` if given, differentiable; one kernel each way if `leaves` compiles.
    See `Kernels.gated_activation`.
    """
    y: Tensor = apply_autograd_function(_GatedActivation, gate_up, weights, activation, limit, leaves)
    return y


# ------------------------------------------------------------------------------------------------------ residual and norm


def upcast_to_fp32(x: Tensor) -> Tensor:
    """Return x in fp32, or unchanged if it is in fp64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def inverse_rms(x: Tensor, count: int | Tensor, eps: float | Tensor) -> Tensor:
    """Return 1 / sqrt(sum of squares / count + eps) of each row of x [N, D] as [N, 1]; for the RMS, `count` is D.
    For few rows pass tensors: torch makes a tensor of a number at each call, which takes as long as the operation.
    """
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.mul_(length).div_(count).add_(eps).rsqrt_()


def fusible_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of x [N, D], and the factor 1 / RMS of each row, [N, 1] in at least fp32."""
    values = upcast_to_fp32(x)
    scale = inverse_rms(values, x.shape[-1], eps)
    normed = (values * scale).mul_(_factor(weight, zero_centered))
    return normed if values is x else normed.to(x.dtype), scale


def fusible_add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + y, its RMSNorm, and the factor 1 / RMS of each row, with the arguments of `fusible_rms_norm`."""
    total = x + y
    return total, *fusible_rms_norm(total, weight, eps, zero_centered)


def fusible_rms_norm_backward(
    dy: Tensor, dx: Tensor | None, x: Tensor, scale: Tensor, weight: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return RMSNorm's gradients of x [N, D], to which `dx` from other uses of x is added, and of the weight [D]."""
    dvalues, values, factor = upcast_to_fp32(dy), upcast_to_fp32(x), _factor(weight, zero_centered)
    product = dvalues * values
    dweight = (product * scale).sum(tuple(range(x.dim() - 1)))
    along = torch.linalg.vecdot(product, factor).unsqueeze(-1) * scale.pow(3)
    out = (dvalues * factor).mul_(scale).addcmul_(values, along, value=-1 / x.shape[-1])
    if dx is not None:
        out = out.add_(dx)
    return out if out.dtype == x.dtype else out.to(x.dtype), dweight.to(weight.dtype)


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    return 1 + upcast_to_fp32(weight) if zero_centered else upcast_to_fp32(weight)


class _AddRmsNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        weight: Tensor,
        eps: float,
        zero_centered: bool,
        leaves: FusibleFunctionCompiler,
    ) -> tuple[Tensor, Tensor]:
        if y is None:
            normed, scale = leaves(fusible_rms_norm, x, weight, eps, zero_centered)
        else:
            x, normed, scale = leaves(fusible_add_rms_norm, x, y, weight, eps, zero_centered)
        ctx.save_for_backward(x, scale, weight)
        ctx.zero_centered, ctx.leaves, ctx.added = zero_centered, leaves, y is not None
        ctx.set_materialize_grads(False)
        return x, normed

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dx, dx if ctx.added else None, None, None, None, None
        out, dweight = ctx.leaves(fusible_rms_norm_backward, dy, dx, *ctx.saved_tensors, ctx.zero_centered)
        return out, out if ctx.added else None, dweight, None, None, None


def add_rms_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, zero_centered: bool, leaves: FusibleFunctionCompiler
) -> tuple[Tensor, Tensor]:
    """Return x + y (x without y) and its RMSNorm, differentiable."""
    stream, normed = apply_autograd_function(_AddRmsNorm, x, y, weight, eps, zero_centered, leaves)
    return stream, normed


# -------------------------------------------------------------------------------------------------------- rotary embedding


def fusible_rotary_embedding(
    cos: Tensor, sin: Tensor, interleaved: bool, back: bool, turning: int, *parts: Tensor
) -> Tensor:
    """Concatenate heads to [B, S, sum H_i, d], the first `turning` rotated by the angles or, if `back`, in reverse.
    The heads are [B, S, H_i, d]; `back` is for the gradient.

    Interleaved, rotation maps pairs of neighbors to halves, and rotating back maps halves to pairs.
    """
    size, sign = 2 * cos.shape[-1], -1 if back else 1
    if torch.compiler.is_compiling():  # the compiler makes one kernel of this, but not of writes into parts of a tensor
        return torch.cat(list(_rotate_parts(cos, sin * sign, interleaved, back, turning, parts)), -2)
    x = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    moving, moved = x.narrow(-2, 0, turning), y.narrow(-2, 0, turning)
    if size < x.shape[-1]:
        moved[..., size:] = moving[..., size:]
        moving, moved = moving[..., :size], moved[..., :size]
    x1, x2 = _halves_or_pairs(moving, interleaved and not back)
    y1, y2 = _halves_or_pairs(moved, interleaved and back)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin, value=sign)
    if turning < x.shape[-2]:
        y[..., turning:, :] = x[..., turning:, :]
    return y


def _rotate_parts(
    cos: Tensor, sin: Tensor, interleaved: bool, back: bool, turning: int, parts: Sequence[Tensor]
) -> Iterator[Tensor]:
    """Yield the parts of `fusible_rotary_embedding`, their first `turning` heads rotated; a partly rotated part is yielded as two."""
    for part in parts:
        own = min(turning, part.shape[-2])
        if own:
            yield _rotate_heads(part[..., :own, :], cos, sin, interleaved, back)
        if own < part.shape[-2]:
            yield part[..., own:, :]
        turning -= own


def _rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    size = 2 * cos.shape[-1]
    x1, x2 = _halves_or_pairs(x[..., :size], interleaved and not back)
    sides = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    rotated = torch.stack(sides, -1).flatten(-2) if interleaved and back else torch.cat(sides, -1)
    return rotated if size == x.shape[-1] else torch.cat([rotated, x[..., size:]], -1)


def _halves_or_pairs(x: Tensor, pairs: bool) -> tuple[Tensor, ...]:
    """Return two views of x [.., r], each [.., r/2]: the firsts and the seconds of its pairs, or its halves."""
    return (x[..., 0::2], x[..., 1::2]) if pairs else x.chunk(2, -1)


class _ApplyRotary(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        heads: Sequence[int],
        turning: int,
        leaves: FusibleFunctionCompiler,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.leaves = interleaved, leaves
        ctx.turning = sum(heads[:turning])
        out = leaves(fusible_rotary_embedding, cos, sin, interleaved, False, ctx.turning, x)
        return out.split_with_sizes(list(heads), -2)

    @staticmethod
    def backward(ctx: Any, *dparts: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.leaves(fusible_rotary_embedding, *ctx.saved_tensors, ctx.interleaved, True, ctx.turning, *dparts)
        return dx, None, None, None, None, None, None


def apply_rotary(
    x: Tensor, rotation: RotaryAngles, heads: Sequence[int], turning: int, leaves: FusibleFunctionCompiler
) -> tuple[Tensor, ...]:
    """Split x [B, S, H, d] into parts of `heads` heads each, of which the first `turning` parts are rotated.

    In training all parts are copies, so that x is not kept alive by a part that is not rotated.
    """
    if (
        not torch.is_grad_enabled()
        and not leaves.compiled
        and not rotation.interleaved
        and 2 * rotation.cos.shape[-1] == x.shape[-1]
    ):
        # fewer operations: for few tokens, launching an operation takes longer than running it
        cos, sin = rotation.duplicated_cos_sin
        moving, fixed = torch.tensor_split(x, [sum(heads[:turning])], -2)
        rotated = torch.addcmul(moving * cos, moving.roll(x.shape[-1] // 2, -1), sin)
        kept = [fixed] if turning + 1 == len(heads) else fixed.split_with_sizes(list(heads[turning:]), -2)
        return *rotated.split_with_sizes(list(heads[:turning]), -2), *kept
    parts: tuple[Tensor, ...] = apply_autograd_function(
        _ApplyRotary, x, rotation.cos, rotation.sin, rotation.interleaved, heads, turning, leaves
    )
    return parts
