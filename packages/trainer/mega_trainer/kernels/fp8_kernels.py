"""FP8 linear layers: quantisation of GEMM operands, and the back end with FP8 GEMMs.

    Y  = X W^T     X by rows, W by rows           summed over D
    dX = dY W      dY by rows, W by columns       summed over N
    dW = dY^T X    dY by columns, X by columns    summed over M

Each operand is quantised along the axis that its GEMM sums over, so X, W and dY each have two forms. The two forms of dY
are made together, and so are those of a weight, once per step; each form of X is made from the activation that the layer
saves in bf16. Scales of X and dY are never reused for the next micro-batch ("current scaling").

    kind               scales
    TensorWise         one per tensor                                               arXiv:2209.05433
    RowWise            one per row
    BlockWise1x128     one per row and 128 columns, for activations and gradients   arXiv:2412.19437
    BlockWise128x128   one per 128 rows and 128 columns, for weights                arXiv:2412.19437
    BlockWise1x32      one per row and 32 columns, of eight bits: MXFP8             arXiv:2310.10537

Scales are powers of two, so scaling is exact: a tensor or row that a layout splits into parts with different scales has the
same values, except those that underflow, 2^13 times (e4m3) or 2^28 times (e5m2) smaller than the largest. No layout splits
blocks.

Legend: M tokens in any number of axes, D input width, N output width, G groups. In functions of two matrices: M and N
rows, K columns, the axis of the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType, SwizzleType

from mega_trainer.kernels import gemm_accumulation, grouped_gemm
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.kernels.kernel_interface import GemmOperand
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.kernels.torch_kernels import TorchKernels

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# rows and columns of a block; 0: all
BLOCKS = {
    ScalingType.TensorWise: (0, 0),
    ScalingType.RowWise: (1, 0),
    ScalingType.BlockWise1x128: (1, 128),
    ScalingType.BlockWise128x128: (128, 128),
    ScalingType.BlockWise1x32: (1, 32),
}
MX = ScalingType.BlockWise1x32
NVFP4_BLOCK, E2M1_MAX = 16, 6.0
ROTATION_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
_TINY = 2.0**-100  # lower bound of scales, for blocks of zeros


class Fp8Matrix(NamedTuple):
    """fp8 matrix, or stack of matrices: `values` that are to be multiplied by the `scale` of their block.

    Attributes:
        values: fp8 [.., M, K], contiguous.
        scale: fp32 [.., rows of blocks, columns of blocks].
        kind: block shape.
    """

    values: Tensor
    scale: Tensor
    kind: ScalingType


class Fp8MatrixWithTranspose(NamedTuple):
    """Matrix [.., M, K] in fp8 (`plain`), and its transpose [.., K, M] in fp8 (`turned`)."""

    plain: Fp8Matrix
    turned: Fp8Matrix


def quantize_matrix(
    x: Tensor, kind: ScalingType, dtype: torch.dtype = E4M3, leaves: FusibleFunctionCompiler | None = None
) -> Fp8Matrix:
    """Quantise a matrix [.., M, K], which may be a transposed view, to fp8 with a scale per block.
    M and K must be multiples of the block's sizes.
    """
    values, scale = (leaves or FusibleFunctionCompiler())(fusible_quantize, x, *BLOCKS[kind], dtype)
    return Fp8Matrix(values, scale, kind)


def fusible_quantize(x: Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return fp8 values and scales of x in blocks of `rows` x `columns` (0: all).
    It compiles to one kernel, or two for a scale of the whole tensor.
    """
    blocks = _view_blocks(x, rows, columns)
    largest = blocks.abs().amax((-3, -1), keepdim=True).float()
    scale = ceil_power_of_two(largest / torch.finfo(dtype).max)
    values = (blocks / scale).to(dtype, memory_format=torch.contiguous_format)
    return values.view(x.shape), scale[..., 0, :, 0]


def quantize_with_transpose(
    x: Tensor, kind: ScalingType, dtype: torch.dtype = E4M3, leaves: FusibleFunctionCompiler | None = None
) -> Fp8MatrixWithTranspose:
    """Quantise a matrix [.., M, K] and its transpose to fp8, for GEMMs that sum over different axes.
    Each is quantised by `quantize_matrix`.
    """
    values, scale, turned, turned_scale = (leaves or FusibleFunctionCompiler())(
        fusible_quantize_with_transpose, x, *BLOCKS[kind], dtype
    )
    return Fp8MatrixWithTranspose(Fp8Matrix(values, scale, kind), Fp8Matrix(turned, turned_scale, kind))


def fusible_quantize_with_transpose(
    x: Tensor, rows: int, columns: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return fp8 values and scales of a matrix and of its transpose, in blocks of `rows` x `columns`.
    Each is quantised as by `fusible_quantize`; compiled, the matrix is read once for both.

    Finding the scales takes another read.
    """
    return *fusible_quantize(x, rows, columns, dtype), *fusible_quantize(x.mT, rows, columns, dtype)


def _view_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """View [.., M, K] as [.., M / rows, rows, K / columns, columns]."""
    *stack, m, k = x.shape
    rows, columns = rows or m, columns or k
    return x.reshape(*stack, m // rows, rows, k // columns, columns)


def ceil_power_of_two(x: Tensor) -> Tensor:
    """Return the smallest power of two that is at least x, for positive fp32; for zero a tiny one."""
    # add all mantissa bits, which carries into the exponent unless x is a power of two; then clear the mantissa
    bits = x.clamp(min=_TINY).view(torch.int32) + 0x7FFFFF
    return (bits & -0x800000).view(torch.float32)


def dequantize_matrix(q: Fp8Matrix, dtype: torch.dtype) -> Tensor:
    """Return the matrix [.., M, K] that the fp8 values times their scales represent, in `dtype`."""
    blocks = _view_blocks(q.values, *BLOCKS[q.kind]).to(dtype)
    return (blocks * q.scale.to(dtype)[..., :, None, :, None]).view(q.values.shape)


def scaled_gemm(a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Multiply fp8 matrices a b^T, [M, K] x [N, K] -> [M, N] in `dtype`.
    Products are summed in fp32, or with `fast` in the less exact accumulator of Hopper's tensor cores, which torch has
    for scales of tensors and rows only.

    On a CPU, block-scaled operands and fp64 outputs are dequantised first.
    """
    by_block = a.kind not in (ScalingType.TensorWise, ScalingType.RowWise)
    if a.values.device.type == "cpu" and (by_block or dtype == torch.float64):
        wide = torch.promote_types(dtype, torch.float32)
        return (dequantize_matrix(a, wide) @ dequantize_matrix(b, wide).t()).to(dtype)
    swizzle = SwizzleType.SWIZZLE_32_4_4 if a.kind == MX else SwizzleType.NO_SWIZZLE
    y: Tensor = F.scaled_mm(
        a.values, b.values.t(), _left_scale(a), a.kind, _right_scale(b), b.kind, swizzle, swizzle,
        output_dtype=dtype, use_fast_accum=fast and not by_block,
    )  # fmt: skip
    return y


def _left_scale(q: Fp8Matrix) -> Tensor:
    """Return the scales in the layout of torch's first operand."""
    if q.kind == ScalingType.BlockWise1x128:
        return q.scale.t().contiguous().t()  # column-major
    return swizzle_mx_scales(q.scale) if q.kind == MX else q.scale


def _right_scale(q: Fp8Matrix) -> Tensor:
    """Return the scales in the layout of torch's second operand, which is passed transposed."""
    if q.kind == ScalingType.BlockWise128x128:
        return F.pad(q.scale, (0, -q.scale.shape[1] % 4)).t()  # padded to a multiple of 4
    return q.scale.t() if q.kind == ScalingType.RowWise else _left_scale(q)


def swizzle_mx_scales(scale: Tensor) -> Tensor:
    """Return MXFP8's block scales [M, K/32] as e8m0, flat, in the order in which Blackwell GPUs read them.

    Tiles are 128 x 4, padded with zeros; in a tile, row r and column c are at 16 (r mod 32) + 4 (r div 32) + c.
    """
    rows, columns = scale.shape
    bytes_ = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    bytes_ = F.pad(bytes_, (0, -columns % 4, 0, -rows % 128))
    tiles = bytes_.view(-1, 4, 32, bytes_.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)


KINDS = {  # by recipe: (of activations and gradients, of weights)
    "tensorwise": (ScalingType.TensorWise, ScalingType.TensorWise),
    "rowwise": (ScalingType.RowWise, ScalingType.RowWise),
    "blockwise": (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
    "mxfp8": (ScalingType.BlockWise1x32, ScalingType.BlockWise1x32),
}


class Fp8OutputGradient(NamedTuple):
    """Output gradient dY quantised to fp8 for the dgrad and wgrad GEMMs.
    `forms` are the quantised forms of dY as [M, N]; `shape` [.., N] and `dtype` describe the unquantised dY.
    """

    forms: Fp8MatrixWithTranspose
    shape: torch.Size
    dtype: torch.dtype


class Fp8Kernels(TorchKernels):
    """Kernel back end whose linear layers multiply in fp8.
    M tokens and the D and N of a weight [N, D] must be multiples of the recipe's block sizes.

    Args:
        recipe: key of `KINDS`.
        gradients: format of dY: e4m3, or e5m2 with a wider range; all else is e4m3.
        leaves: calls the quantisation leaves.
    """

    def __init__(
        self, recipe: str, gradients: torch.dtype = E4M3, leaves: FusibleFunctionCompiler | None = None
    ) -> None:
        super().__init__(leaves)
        self.recipe, self.gradients = recipe, gradients

    def prepare_weight(self, weight: Tensor) -> GemmOperand:
        """Quantise a linear layer's weight and its transpose to fp8."""
        return quantize_with_transpose(weight, KINDS[self.recipe][1], leaves=self.leaves)

    def prepare_grouped_weight(self, weight: Tensor) -> GemmOperand:
        """Quantise a stack of expert weights and their transposes to fp8."""
        return quantize_with_transpose(weight, self._grouped_kinds[1], leaves=self.leaves)

    def prepare_gradient(self, dy: Tensor) -> GemmOperand:
        """Quantise an output gradient dY and its transpose to fp8."""
        forms = quantize_with_transpose(dy.flatten(0, -2), KINDS[self.recipe][0], self.gradients, self.leaves)
        return Fp8OutputGradient(forms, dy.shape, dy.dtype)

    def linear_forward(self, x: Tensor, weight: GemmOperand, bias: Tensor | None = None) -> Tensor:
        """Return Y = X W^T + b, multiplied in fp8."""
        w = weight.plain if isinstance(weight, Fp8MatrixWithTranspose) else self._weight(weight)
        y = scaled_gemm(self._tokens(x.flatten(0, -2)), w, x.dtype, fast=True)
        y = y.view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    def linear_dgrad(self, dy: GemmOperand, weight: GemmOperand) -> Tensor:
        """Return the input gradient dX = dY W, multiplied in fp8."""
        w = weight.turned if isinstance(weight, Fp8MatrixWithTranspose) else self._weight(weight.t())
        dx = scaled_gemm(dy.forms.plain, w, dy.dtype)
        return dx.view(*dy.shape[:-1], -1)

    def linear_wgrad(self, dy: GemmOperand, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Return the weight gradient dW = dY^T X, multiplied in fp8, in or added to `out` if given.

        The result is rounded to the dtype of the activations before it is written to a wider `out`.
        """
        dw = scaled_gemm(dy.forms.turned, self._tokens(x.flatten(0, -2).t()), x.dtype)
        if out is None:
            return dw
        gemm_accumulation.write_or_add_values(out, dw, add=add)
        return out

    def grouped_linear(self, x: Tensor, weight: GemmOperand, rows: GroupedRows) -> Tensor:
        """Multiply each row by its group's matrix in fp8.

        The tensorwise recipe uses rowwise scales here, which torch supports. The GEMM for dW stays in bf16: it sums over
        the rows of a group, whose number need not be a multiple of the block size.
        """
        return self._grouped(x, weight.plain if isinstance(weight, Fp8MatrixWithTranspose) else weight, rows)

    def grouped_dgrad(self, dy: Tensor, weight: GemmOperand, rows: GroupedRows) -> Tensor:
        """Return the input gradient of a grouped GEMM, with dY in e4m3.
        This is the one format of torch's grouped GEMM.
        """
        return self._grouped(dy, weight.turned if isinstance(weight, Fp8MatrixWithTranspose) else weight.mT, rows)

    def _grouped(self, x: Tensor, weight: Tensor | Fp8Matrix, rows: GroupedRows) -> Tensor:
        kind, fixed = self._grouped_kinds
        w = weight if isinstance(weight, Fp8Matrix) else quantize_matrix(weight, fixed, leaves=self.leaves)
        return _grouped_scaled_gemm(quantize_matrix(x, kind, leaves=self.leaves), w, rows, x.dtype)

    @property
    def _grouped_kinds(self) -> tuple[ScalingType, ScalingType]:
        return KINDS["rowwise" if self.recipe == "tensorwise" else self.recipe]

    def _tokens(self, x: Tensor) -> Fp8Matrix:
        return quantize_matrix(x, KINDS[self.recipe][0], leaves=self.leaves)

    def _weight(self, weight: Tensor) -> Fp8Matrix:
        return quantize_matrix(weight, KINDS[self.recipe][1], leaves=self.leaves)


def _grouped_scaled_gemm(x: Fp8Matrix, weight: Fp8Matrix, rows: GroupedRows, dtype: torch.dtype) -> Tensor:
    """Multiply rows [M, D] by their group's matrix of [G, N, D]: [M, N]. A CPU multiplies the dequantised numbers."""
    if x.values.device.type == "cpu":
        wide = torch.promote_types(dtype, torch.float32)
        return grouped_gemm.grouped_gemm(dequantize_matrix(x, wide), dequantize_matrix(weight, wide).mT, rows).to(dtype)
    y: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        x.values, weight.values.mT, x.scale.flatten(), x.kind, weight.scale.flatten(1), weight.kind,
        offs=rows.ends, output_dtype=dtype, use_fast_accum=True,
    )  # fmt: skip
    return y


def round_to_nvfp4(x: Tensor, rows: int = 1) -> Tensor:
    """Return a matrix [.., M, K] rounded to NVFP4, in its own dtype: e2m1 values times a scale for `rows` x 16 of them.
    A rounded matrix is unchanged.

    Scales have the three mantissa bits of e4m3 and any exponent, as if each block had the scale of a tensor with its largest
    value; so no layout that keeps blocks whole changes a value.
    """
    blocks = _view_blocks(x.to(torch.promote_types(x.dtype, torch.float32)), rows, NVFP4_BLOCK)
    mantissa, exponent = torch.frexp(blocks.abs().amax((-3, -1), keepdim=True).float() / E2M1_MAX)
    scale = torch.ldexp((mantissa * 16).round() / 16, exponent).clamp(min=_TINY)
    values = (blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)
    step = torch.ldexp(torch.ones_like(values), torch.frexp(values.abs().clamp(min=1))[1] - 2)
    return ((values / step).round() * step * scale).view(x.shape).to(x.dtype)


def rotate_blocks(x: Tensor) -> Tensor:
    """Multiply each 16 columns of a matrix [M, K] by a Hadamard matrix with fixed signs, which spreads outliers.
    The signs are Transformer Engine's; the product of two rotated matrices a b^T is that of the matrices.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    two = torch.tensor([[1, 1], [1, -1]], device=x.device, dtype=wide)
    four = torch.kron(two, two)
    rotation = x.new_tensor(ROTATION_SIGNS, dtype=wide)[:, None] * torch.kron(four, four) / 4
    return (x.to(wide).reshape(-1, NVFP4_BLOCK) @ rotation).view(x.shape).to(x.dtype)


class Nvfp4Kernels(TorchKernels):
    """Kernel back end for CPUs whose linear layers multiply operands rounded to NVFP4.
    It is Transformer Engine's recipe (arXiv:2509.25149).

    Weights have blocks of 16 x 16, activations and gradients of 16 along the axis of the sum, and the operands of the weight
    gradient are rotated first. Gradients are rounded to nearest, not stochastically as on a GPU: a stochastic rounding that
    is the same in every layout would need each value's position in the whole tensor.
    """

    def prepare_weight(self, weight: Tensor) -> GemmOperand:
        """Return a linear layer's weight rounded to NVFP4, in its own dtype."""
        return round_to_nvfp4(weight, NVFP4_BLOCK)

    def linear_forward(self, x: Tensor, weight: GemmOperand, bias: Tensor | None = None) -> Tensor:
        """Return Y = X W^T + b with operands rounded to NVFP4."""
        return super().linear_forward(round_to_nvfp4(x), self.prepare_weight(weight), bias)

    def linear_dgrad(self, dy: GemmOperand, weight: GemmOperand) -> Tensor:
        """Return the input gradient dX = dY W with operands rounded to NVFP4."""
        return super().linear_dgrad(round_to_nvfp4(dy), self.prepare_weight(weight))

    def linear_wgrad(self, dy: GemmOperand, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Return dW = dY^T X with operands rotated over tokens and rounded to NVFP4, in or added to `out` if given."""
        turned_dy, turned_x = (round_to_nvfp4(rotate_blocks(t.flatten(0, -2).t())) for t in (dy, x))
        return gemm_accumulation.gemm_into(turned_dy, turned_x.t(), out, add=add)
