"""The short causal convolution before a recurrence, channel by channel, as one leaf forward and one backward.

    z[t] = b + sum_{j<k} w[j] x[t - k + 1 + j]        y = silu(z)

A token that is no token of t's document, or stands before the first one known, counts as zero. Legend: B batch, S sequence,
c channels, k taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mega_trainer.kernels.fused import wide
from mega_trainer.kernels.leaves import Leaves, recorded


def conv_leaf(x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, reach: Tensor | None) -> Tensor:
    """See `short_conv`."""
    taps, seen = _taps(x, before, weight.shape[1], reach)
    return F.silu(_sums(taps, weight, bias, seen)).to(x.dtype)


def conv_backward_leaf(
    dy: Tensor, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, reach: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, of the k - 1 tokens before it, of the weight and of the bias; the sums are computed again."""
    taps, seen = _taps(x, before, weight.shape[1], reach)
    dz = torch.ops.aten.silu_backward(wide(dy), _sums(taps, weight, bias, seen))
    dpadded, factors = torch.zeros_like(taps), wide(weight)
    dweight = torch.empty_like(factors)
    for j, mask in enumerate(seen):
        here = slice(j, j + x.shape[1])
        gradient = dz if mask is None else dz * mask
        dweight[:, j] = (gradient * taps[:, here]).sum((0, 1))  # einsum would be a product a channel
        dpadded[:, here].addcmul_(gradient, factors[:, j])
    first = weight.shape[1] - 1
    dx, dbefore = dpadded[:, first:].to(x.dtype), dpadded[:, :first].to(x.dtype)
    return dx, dbefore, dweight.to(weight.dtype), dz.sum((0, 1)).to(weight.dtype)


def _taps(x: Tensor, before: Tensor | None, k: int, reach: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """The tokens [B, k - 1 + S, c] that all see, in at least fp32; and which queries each tap is a token of the document for."""
    padded = F.pad(x, (0, 0, k - 1, 0)) if before is None else torch.cat([before, x], 1)
    far = range(k - 1, -1, -1)  # how far back each tap is
    return wide(padded), [None if reach is None or d == 0 else (reach >= d).unsqueeze(-1) for d in far]


def _sums(taps: Tensor, weight: Tensor, bias: Tensor | None, seen: list[Tensor | None]) -> Tensor:
    """z [B, S, c]."""
    factors, length = wide(weight), taps.shape[1] - weight.shape[1] + 1
    z = taps[:, -length:] * factors[:, -1]
    for j, mask in enumerate(seen[:-1]):
        tap = taps[:, j : j + length]
        z = z.addcmul_(tap if mask is None else tap * mask, factors[:, j])
    return z if bias is None else z.add_(wide(bias))


class _ShortConv(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        before: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        reach: Tensor | None,
        leaves: Leaves,
    ) -> Tensor:
        ctx.save_for_backward(x, before, weight, bias, reach)
        ctx.leaves = leaves
        return leaves(conv_leaf, x, before, weight, bias, reach)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, before, weight, bias, reach = ctx.saved_tensors
        dx, dbefore, dweight, dbias = ctx.leaves(conv_backward_leaf, dy, x, before, weight, bias, reach)
        return dx, None if before is None else dbefore, dweight, None if bias is None else dbias, None, None


def short_conv(
    x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, reach: Tensor | None, leaves: Leaves
) -> Tensor:
    """See `Kernels.short_conv`."""
    y: Tensor = recorded(_ShortConv, x, before, weight, bias, reach, leaves)
    return y
