"""Linear layers in eight bits: the back end that quantises the factors of their products, and leaves the rest to torch.

    Y  = X W^T     X by rows, W by rows           summed over D
    dX = dY W      dY by rows, W by columns       summed over N
    dW = dY^T X    dY by columns, X by columns    summed over M

Each factor is quantised along the axis that its product sums over, so X, W and dY each have two forms. Those of dY are
made together, and so are those of a weight that is the same for all micro-batches of a step; those of X are made each from
what a layer keeps in bf16. No scale of X or dY goes from one micro-batch to the next ("current scaling").

Legend: M tokens in any number of axes, D input width, N output width, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from mega_trainer.kernels import grouped, products
from mega_trainer.kernels.base import Factor
from mega_trainer.kernels.grouped import Rows
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.kernels.quantise import E4M3, Both, Quantised, dequantise, product, quantise, quantise_both
from mega_trainer.kernels.torch import TorchKernels

KINDS = {  # of activations and gradients, and of weights
    "tensorwise": (ScalingType.TensorWise, ScalingType.TensorWise),
    "rowwise": (ScalingType.RowWise, ScalingType.RowWise),
    "blockwise": (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
    "mxfp8": (ScalingType.BlockWise1x32, ScalingType.BlockWise1x32),
}


class Gradient(NamedTuple):
    """dY of `shape` [.., N] and `dtype`, in eight bits: `forms` of [M, N]."""

    forms: Both
    shape: torch.Size
    dtype: torch.dtype


class Fp8Kernels(TorchKernels):
    """`Kernels` whose linear layers multiply in fp8; every M, D and N is a multiple of the recipe's in `fp8.MULTIPLES`.

    Args:
        recipe: the kinds of scales, of `KINDS`.
        gradients: the format of dY: e4m3, or e5m2 of a wider range; all else is e4m3.
        leaves: quantises.
    """

    def __init__(self, recipe: str, gradients: torch.dtype = E4M3, leaves: Leaves | None = None) -> None:
        super().__init__(leaves)
        self.recipe, self.gradients = recipe, gradients

    def prepare_weight(self, weight: Tensor) -> Factor:
        """See `Kernels.prepare_weight`."""
        return quantise_both(weight, KINDS[self.recipe][1], leaves=self.leaves)

    def prepare_grouped_weight(self, weight: Tensor) -> Factor:
        """See `Kernels.prepare_grouped_weight`."""
        return quantise_both(weight, self._grouped_kinds[1], leaves=self.leaves)

    def prepare_gradient(self, dy: Tensor) -> Factor:
        """See `Kernels.prepare_gradient`."""
        forms = quantise_both(dy.flatten(0, -2), KINDS[self.recipe][0], self.gradients, self.leaves)
        return Gradient(forms, dy.shape, dy.dtype)

    def linear(self, x: Tensor, weight: Factor, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""
        w = weight.plain if isinstance(weight, Both) else self._weight(weight)
        y = product(self._tokens(x.flatten(0, -2)), w, x.dtype, fast=True)
        y = y.view(*x.shape[:-1], -1)
        return y if bias is None else y + bias

    def linear_dx(self, dy: Factor, weight: Factor) -> Tensor:
        """See `Kernels.linear_dx`."""
        w = weight.turned if isinstance(weight, Both) else self._weight(weight.t())
        dx = product(dy.forms.plain, w, dy.dtype)
        return dx.view(*dy.shape[:-1], -1)

    def linear_dw(self, dy: Factor, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """See `Kernels.linear_dw`; the product is rounded to the factors' precision before it goes into a wider `out`."""
        dw = product(dy.forms.turned, self._tokens(x.flatten(0, -2).t()), x.dtype)
        if out is None:
            return dw
        products.put(out, dw, add=add)
        return out

    def grouped_linear(self, x: Tensor, weight: Factor, rows: Rows) -> Tensor:
        """See `Kernels.grouped_linear`; tensorwise scales are rowwise here, which is the kind that torch has.

        The product for dW is left in bf16: it sums over the rows of a group, which may be any number of them.
        """
        return self._grouped(x, weight.plain if isinstance(weight, Both) else weight, rows)

    def grouped_dx(self, dy: Tensor, weight: Factor, rows: Rows) -> Tensor:
        """See `Kernels.grouped_dx`; dY in e4m3, the one format that torch's grouped product takes."""
        return self._grouped(dy, weight.turned if isinstance(weight, Both) else weight.mT, rows)

    def _grouped(self, x: Tensor, weight: Tensor | Quantised, rows: Rows) -> Tensor:
        kind, fixed = self._grouped_kinds
        w = weight if isinstance(weight, Quantised) else quantise(weight, fixed, leaves=self.leaves)
        return _grouped_product(quantise(x, kind, leaves=self.leaves), w, rows, x.dtype)

    @property
    def _grouped_kinds(self) -> tuple[ScalingType, ScalingType]:
        return KINDS["rowwise" if self.recipe == "tensorwise" else self.recipe]

    def _tokens(self, x: Tensor) -> Quantised:
        return quantise(x, KINDS[self.recipe][0], leaves=self.leaves)

    def _weight(self, weight: Tensor) -> Quantised:
        return quantise(weight, KINDS[self.recipe][1], leaves=self.leaves)


def _grouped_product(x: Quantised, weight: Quantised, rows: Rows, dtype: torch.dtype) -> Tensor:
    """Rows [M, D] by their group's matrix, of [G, N, D]: [M, N]. A CPU multiplies the numbers they stand for."""
    if x.values.device.type == "cpu":
        wide = torch.promote_types(dtype, torch.float32)
        return grouped.product(dequantise(x, wide), dequantise(weight, wide).mT, rows).to(dtype)
    y: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        x.values, weight.values.mT, x.scale.flatten(), x.kind, weight.scale.flatten(1), weight.kind,
        offs=rows.ends, output_dtype=dtype, use_fast_accum=True,
    )  # fmt: skip
    return y
