"""GEMM and sums into a given tensor of wider dtype: gradients of low-precision weights, accumulated in fp32.

A GPU computes and adds a part in the precision of the sum, in one kernel. On a CPU torch has no such kernel: there a part
is rounded to the weight's precision first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PIECE, PIECES = 1 << 18, 1 << 8  # elements of a part, and most parts


def gemm_into(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """Multiply a [M, K] by b [K, N] into a new tensor or `out` [M, N]; with `add` the product is added to `out`."""
    if out is None:
        return a.mm(b)
    if out.dtype == a.dtype:
        return out.addmm_(a, b) if add else torch.mm(a, b, out=out)
    if not _is_gpu(out):
        return write_or_add_values(out, a.mm(b), add=add)
    if add:
        return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def gemm_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [M, K] by b [K, N] of any precision, with a result in at least fp32."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return a.mm(b)
    return torch.mm(a, b, out_dtype=torch.float32) if _is_gpu(a) else a.float().mm(b.float())


def write_scaled_values(values: Tensor, scale: Tensor, dtype: torch.dtype, out: Tensor, *, add: bool) -> Tensor:
    """Write `values * scale` into `out`, or with `add` add it to `out`; on a CPU it is rounded to `dtype` before."""
    if not _is_gpu(out):  # not fused, for the rounding of a gradient that autograd passes on
        for some, part in zip(_split_for_cache(out), _split_for_cache(values), strict=True):
            write_or_add_values(some, (part * scale).to(dtype), add=add)
        return out
    return out.addcmul_(values, scale) if add else torch.mul(values, scale, out=out)


def write_embedding_grad(values: Tensor, row_indices: Tensor, out: Tensor, *, add: bool) -> Tensor:
    """Write the sums of token gradients `values` [.., D] by row (`row_indices` [..]) to `out` [R, D], or with `add` add them.
    Values of the same row are added in a fixed order.
    """
    if not _is_gpu(out):
        return write_or_add_values(
            out, torch.ops.aten.embedding_dense_backward(values, row_indices, len(out), -1, False), add=add
        )
    if not add:
        out.zero_()
    return out.index_put_((row_indices.flatten(),), values.flatten(0, -2).to(out.dtype), accumulate=True)


def write_or_add_values(out: Tensor, values: Tensor, *, add: bool) -> Tensor:
    """Write values into a tensor, or with `add` add them to the tensor."""
    if not add:
        return out.copy_(values)
    if _is_gpu(out) or out.dtype == values.dtype:
        return out.add_(values)
    for some, part in zip(_split_for_cache(out), _split_for_cache(values), strict=True):
        some.add_(part)
    return out


def _split_for_cache(whole: Tensor) -> Sequence[Tensor]:
    """Split by the first axis into parts so small that a converted copy of each fits a CPU's cache."""
    rows = max(PIECE * len(whole) // max(1, whole.numel()), -(-len(whole) // PIECES))
    return torch.split(whole, max(1, rows))


def _is_gpu(out: Tensor) -> bool:
    return out.device.type != "cpu"
