"""Products of matrices that are added to what is there."""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out [M, N] += a [M, K] b [K, N]; `out` may be wider than the factors.

    A GPU then adds inside the product, without rounding it; on a CPU torch has no such product, and it is rounded to the
    factors' precision first.
    """
    if out.dtype == a.dtype:
        out.addmm_(a, b)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out += a @ b


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] b [K, N] in at least fp32, summed and left there, whatever the factors' precision."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return a.mm(b)
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float().mm(b.float())
