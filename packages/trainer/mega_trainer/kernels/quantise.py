"""Matrices of eight-bit floats with a scale for the whole, each row or each block (arXiv:2209.05433).

    kind               scales               by
    TensorWise         one                  arXiv:2209.05433, of the tensor at hand (current scaling)
    RowWise            one a row
    BlockWise1x128     one a row and 128 columns, for activations and gradients     arXiv:2412.19437
    BlockWise128x128   one for 128 rows and 128 columns, for weights                arXiv:2412.19437
    BlockWise1x32      one a row and 32 columns, of eight bits: MXFP8               arXiv:2310.10537

A scale is a power of two. As these are floats, such a scale moves their range and rounds nothing else: a tensor or row that
a layout cuts into parts with scales of their own stands for the same numbers, but for those that leave the range below,
2^13 times (e4m3) or 2^28 times (e5m2) smaller than the largest. Blocks no layout cuts at all.

Legend: M, N rows of two factors, K columns, over which they are multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from mega_trainer.kernels.leaves import Leaves

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# rows and columns of a block; 0 for all
BLOCKS = {
    ScalingType.TensorWise: (0, 0),
    ScalingType.RowWise: (1, 0),
    ScalingType.BlockWise1x128: (1, 128),
    ScalingType.BlockWise128x128: (128, 128),
    ScalingType.BlockWise1x32: (1, 32),
}
MX = ScalingType.BlockWise1x32
_TINY = 2.0**-100  # a block of zeros has a scale too


class Quantised(NamedTuple):
    """A matrix, or a stack of them, as `values` times the scale of each block.

    Attributes:
        values: fp8 [.., M, K], contiguous.
        scale: fp32 [.., rows of blocks, columns of blocks].
        kind: what a block is.
    """

    values: Tensor
    scale: Tensor
    kind: ScalingType


class Both(NamedTuple):
    """A matrix [.., M, K] in eight bits, and its transpose [.., K, M]."""

    plain: Quantised
    turned: Quantised


def quantise(x: Tensor, kind: ScalingType, dtype: torch.dtype = E4M3, leaves: Leaves | None = None) -> Quantised:
    """A matrix [.., M, K], which may be a transposed one, whose sizes are multiples of its blocks'."""
    values, scale = (leaves or Leaves())(quantised, x, *BLOCKS[kind], dtype)
    return Quantised(values, scale, kind)


def quantised(x: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A leaf: values and scales in blocks of `rows` x `columns`. One kernel, but for a scale of the whole tensor, of two."""
    blocks = _blocks(x, rows, columns)
    largest = blocks.abs().amax((-3, -1), keepdim=True).float()
    scale = power_above(largest / torch.finfo(dtype).max)
    values = (blocks / scale).to(dtype, memory_format=torch.contiguous_format)
    return values.view(x.shape), scale[..., 0, :, 0]


def quantise_both(x: Tensor, kind: ScalingType, dtype: torch.dtype = E4M3, leaves: Leaves | None = None) -> Both:
    """A matrix [.., M, K] and its transpose, each as `quantise` makes it, for two products that sum over other axes."""
    values, scale, turned, turned_scale = (leaves or Leaves())(quantised_both, x, *BLOCKS[kind], dtype)
    return Both(Quantised(values, scale, kind), Quantised(turned, turned_scale, kind))


def quantised_both(x: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A leaf: `quantised` of a matrix and of its transpose, which is read once for both, but for what finds scales."""
    return *quantised(x, rows, columns, dtype), *quantised(x.mT, rows, columns, dtype)


def _blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """[.., M, K] -> [.., M / rows, rows, K / columns, columns]."""
    *stack, m, k = x.shape
    rows, columns = rows or m, columns or k
    return x.reshape(*stack, m // rows, rows, k // columns, columns)


def power_above(x: Tensor) -> Tensor:
    """The smallest power of two that is at least x, of positive fp32; of zeros a small one."""
    # one less than the next exponent is added, and what then stands below the exponent is dropped
    bits = x.clamp(min=_TINY).view(torch.int32) + 0x7FFFFF
    return (bits & -0x800000).view(torch.float32)


def dequantise(q: Quantised, dtype: torch.dtype) -> Tensor:
    """The matrix [.., M, K] that the values stand for."""
    blocks = _blocks(q.values, *BLOCKS[q.kind]).to(dtype)
    return (blocks * q.scale.to(dtype)[..., :, None, :, None]).view(q.values.shape)


def product(a: Quantised, b: Quantised, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """[M, K] x [N, K] -> [M, N] in `dtype`, summed in fp32; `fast`: with the fewer bits that Hopper's tensor cores keep.

    A CPU multiplies what is scaled by blocks, and fp64, as the numbers they stand for.
    """
    by_block = a.kind not in (ScalingType.TensorWise, ScalingType.RowWise)
    if a.values.device.type == "cpu" and (by_block or dtype == torch.float64):
        wide = torch.promote_types(dtype, torch.float32)
        return (dequantise(a, wide) @ dequantise(b, wide).t()).to(dtype)
    swizzle = SwizzleType.SWIZZLE_32_4_4 if a.kind == MX else SwizzleType.NO_SWIZZLE
    y: Tensor = F.scaled_mm(
        a.values, b.values.t(), _left_scale(a), a.kind, _right_scale(b), b.kind, swizzle, swizzle,
        output_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip
    return y


def _left_scale(q: Quantised) -> Tensor:
    """The scales as torch's product wants those of its first factor."""
    if q.kind == ScalingType.BlockWise1x128:
        return q.scale.t().contiguous().t()  # the rows' scales of one block side by side
    return swizzled(q.scale) if q.kind == MX else q.scale


def _right_scale(q: Quantised) -> Tensor:
    """The scales as torch's product wants those of its second factor, which it is given transposed."""
    if q.kind == ScalingType.BlockWise128x128:
        return F.pad(q.scale, (0, -q.scale.shape[1] % 4)).t()  # in fours
    return q.scale.t() if q.kind == ScalingType.RowWise else _left_scale(q)


def swizzled(scale: Tensor) -> Tensor:
    """MXFP8's scales [M, K/32] as e8m0 in the order in which Blackwell reads them, flat.

    Tiles of 128 x 4, filled up with zeros; within one, row r and column c stand at 16 (r mod 32) + 4 (r div 32) + c.
    """
    rows, columns = scale.shape
    bytes_ = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    bytes_ = F.pad(bytes_, (0, -columns % 4, 0, -rows % 128))
    tiles = bytes_.view(-1, 4, 32, bytes_.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)
