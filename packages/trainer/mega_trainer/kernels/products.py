"""Sums into a given tensor that may be wider than what is added: gradients of low-precision weights, kept in fp32.

A GPU makes and adds them in the precision of the sum, in one kernel. On a CPU torch has none for that: there a part is
rounded to the weight's precision first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE, PIECES = 1 << 18, 1 << 8  # elements, and as many at most


def product(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """a [M, K] b [K, N]: as a new tensor, or into `out` [M, N], and with `add` to what is there."""
    if out is None:
        return a.mm(b)
    if out.dtype == a.dtype:
        return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    if not _at_once(out):
        return put(out, a.mm(b), add=add)
    if add:
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] b [K, N] in at least fp32, summed and left there, whatever the factors' precision."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return a.mm(b)
    return torch.mm(a, b, out_dtype=torch.float32) if _at_once(a) else a.float().mm(b.float())


def scaled(values: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor, *, add: bool) -> Tensor:
    """Values, in at least fp32, times a scalar: the gradient of a weight of `dtype`, into `out` as for `product`."""
    if not _at_once(out):  # not fused, or it would not be rounded as what autograd hands on is
        for some, part in zip(_pieces(out), _pieces(values), strict=True):
            put(some, (part * scale).to(dtype), add=add)
        return out
    return out.addcmul_(values, scale) if add else torch.mul(values, scale, out=out)


def rows(values: Tensor, places: Tensor, out: Tensor, *, add: bool) -> Tensor:
    """Values [.., D] to the rows `places` [..] of `out` [R, D], the gradient of an embedding, as for `product`.

    Those of one row are added in a fixed order.
    """
    if not _at_once(out):
        return put(out, torch.ops.aten.embedding_dense_backward(values, places, len(out), -1, False), add=add)
    if not add:
        out.zero_()
    return out.index_put_((places.flatten(),), values.flatten(0, -2).to(out.dtype), accumulate=True)


def put(out: Tensor, values: Tensor, *, add: bool) -> Tensor:
    """Values into `out`, or with `add` to what is there."""
    if not add:
        return out.copy_(values)
    if _at_once(out) or out.dtype == values.dtype:
        return out.add_(values)
    for some, part in zip(_pieces(out), _pieces(values), strict=True):
        some.add_(part)
    return out


def _pieces(whole: Tensor) -> Sequence[Tensor]:
    """By its first axis, each small enough that what a CPU makes of it before it adds, in another precision, stays in its cache."""
    rows = max(PIECE * len(whole) // max(1, whole.numel()), -(-len(whole) // PIECES))
    return torch.split(whole, max(1, rows))


def _at_once(out: Tensor) -> bool:
    return out.device.type != "cpu"
