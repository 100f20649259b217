"""Short causal depthwise convolution before a recurrence, as one leaf forward and one backward.

    z[t] = b + sum_{j<k} w[j] x[t - k + 1 + j]        y = silu(z), or z

Tokens of other documents than t's, and tokens before the first one given, count as zero.

Legend: B batch, S sequence, c channels, k taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler, apply_autograd_function


def fusible_causal_convolution(
    x: Tensor,
    before: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    preceding_tokens: Tensor | None,
    silu: bool = True,
) -> Tensor:
    """Return the causal convolution of x, without autograd, with the arguments of `Kernels.short_convolution`."""
    taps, seen = _padded_taps(x, before, weight.shape[1], preceding_tokens)
    z = _convolve(taps, weight, bias, seen)
    return (F.silu(z) if silu else z).to(x.dtype)


def fusible_causal_convolution_backward(
    dy: Tensor,
    x: Tensor,
    before: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    preceding_tokens: Tensor | None,
    silu: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of a causal convolution: of x, of the k - 1 tokens before x, of the weight and of the bias.
    The pre-activation is recomputed.
    """
    taps, seen = _padded_taps(x, before, weight.shape[1], preceding_tokens)
    dz = upcast_to_fp32(dy)
    if silu:
        dz = torch.ops.aten.silu_backward(dz, _convolve(taps, weight, bias, seen))
    dpadded, factors = torch.zeros_like(taps), upcast_to_fp32(weight)
    dweight = torch.empty_like(factors)
    for j, mask in enumerate(seen):
        here = slice(j, j + x.shape[1])
        gradient = dz if mask is None else dz * mask
        dweight[:, j] = (gradient * taps[:, here]).sum((0, 1))  # einsum would launch a GEMM per channel
        dpadded[:, here].addcmul_(gradient, factors[:, j])
    first = weight.shape[1] - 1
    dx, dbefore = dpadded[:, first:].to(x.dtype), dpadded[:, :first].to(x.dtype)
    return dx, dbefore, dweight.to(weight.dtype), dz.sum((0, 1)).to(weight.dtype)


def _padded_taps(
    x: Tensor, before: Tensor | None, k: int, preceding_tokens: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the tokens [B, k - 1 + S, c] of all taps in at least fp32, and per tap a mask of t in the tap's document."""
    padded = F.pad(x, (0, 0, k - 1, 0)) if before is None else torch.cat([before, x], 1)
    distances = range(k - 1, -1, -1)  # of each tap from t
    return upcast_to_fp32(padded), [
        None if preceding_tokens is None or d == 0 else (preceding_tokens >= d).unsqueeze(-1) for d in distances
    ]


def _convolve(taps: Tensor, weight: Tensor, bias: Tensor | None, seen: list[Tensor | None]) -> Tensor:
    """Return z [B, S, c]."""
    factors, length = upcast_to_fp32(weight), taps.shape[1] - weight.shape[1] + 1
    z = taps[:, -length:] * factors[:, -1]
    for j, mask in enumerate(seen[:-1]):
        tap = taps[:, j : j + length]
        z = z.addcmul_(tap if mask is None else tap * mask, factors[:, j])
    return z if bias is None else z.add_(upcast_to_fp32(bias))


class _ShortConvolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        before: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        preceding_tokens: Tensor | None,
        silu: bool,
        leaves: FusibleFunctionCompiler,
    ) -> Tensor:
        ctx.save_for_backward(x, before, weight, bias, preceding_tokens)
        ctx.silu, ctx.leaves = silu, leaves
        return leaves(fusible_causal_convolution, x, before, weight, bias, preceding_tokens, silu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, before, weight, bias, reach = ctx.saved_tensors
        dx, dbefore, dweight, dbias = ctx.leaves(
            fusible_causal_convolution_backward, dy, x, before, weight, bias, reach, ctx.silu
        )
        return dx, None if before is None else dbefore, dweight, None if bias is None else dbias, None, None, None


def short_convolution(
    x: Tensor,
    before: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    preceding_tokens: Tensor | None,
    silu: bool,
    leaves: FusibleFunctionCompiler,
) -> Tensor:
    """Convolve each channel of x causally with its own taps, and apply SiLU if `silu`; differentiable.
    Arguments and result are as in `Kernels.short_convolution`.
    """
    y: Tensor = apply_autograd_function(_ShortConvolution, x, before, weight, bias, preceding_tokens, silu, leaves)
    return y
