"""Products of matrices into a given tensor, which may be wider than the factors.

A GPU then sums and adds inside the product, without rounding it. On a CPU torch has no such product: there it is rounded
to the factors' precision first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def product(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """a [M, K] b [K, N]: as a new tensor, or into `out` [M, N], and with `add` to what is there."""
    if out is None:
        return a.mm(b)
    if add:
        add_product(out, a, b)
    elif out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif out.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        out.copy_(a.mm(b))
    return out


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [M, N] += a [M, K] b [K, N]."""
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out += a.mm(b)


def put(out: Tensor, values: Tensor, *, add: bool) -> None:
    """Values into `out`, or with `add` to what is there."""
    if add:
        out.add_(values)
    else:
        out.copy_(values)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] b [K, N] in at least fp32, summed and left there, whatever the factors' precision."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return a.mm(b)
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float().mm(b.float())
