"""Transformer Engine: its products for linear layers, in fp8 by its recipes too, and its attention, which is cuDNN's.

Its own modules own their weights, and know nothing of what else is done with them; so linear layers call its product, as
these modules do, and attention, which has no weights, is the module. It is imported where it is used alone.

Legend: M tokens in any number of axes, D input width, N output width; B batch, S sequence, H query heads, K key/value heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mega_trainer.kernels.base import Factor, Scores, WholeAttention
from mega_trainer.kernels.flash import Flash, fits_gpu
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.kernels.masks import Mask, Packed
from mega_trainer.kernels.recurrent import RecurrentLibraries
from mega_trainer.kernels.torch import TorchKernels


class TeLinearKernels(TorchKernels):
    """`Kernels` whose linear layers multiply by Transformer Engine; in fp8 all of M, D and N are multiples of 16 (MXFP8: 32).

    Args:
        recipe: tensorwise, blockwise or mxfp8, by which both factors of each product are quantised as it comes ("current
            scaling"); None leaves them as they are.
        wide_gradients: those of outputs are in e5m2, all else in e4m3.
    """

    def __init__(
        self,
        leaves: Leaves | None = None,
        flash: Flash | None = None,
        whole: WholeAttention | None = None,
        recurrent: RecurrentLibraries | None = None,
        *,
        recipe: str | None = None,
        wide_gradients: bool = False,
    ) -> None:
        from transformer_engine.pytorch import cpp_extensions

        super().__init__(leaves, flash, whole, recurrent)
        self.library = cpp_extensions
        self.x: Any
        self.weight: Any
        self.dy: Any
        self.x, self.weight, self.dy = _quantizers(recipe, wide_gradients) if recipe else (None, None, None)
        self.precise = recipe == "blockwise"  # its scales are applied as the product is summed

    def prepare_weight(self, weight: Tensor) -> Factor:
        """See `Kernels.prepare_weight`."""
        return _prepared(self.weight, weight)

    def prepare_gradient(self, dy: Tensor) -> Factor:
        """See `Kernels.prepare_gradient`."""
        return _prepared(self.dy, dy)

    def linear(self, x: Tensor, weight: Factor, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""
        a, b = _factor(self.weight, weight, rowwise=True), _factor(self.x, x, rowwise=True)
        y, *_ = self.library.general_gemm(
            a, b, out_dtype=x.dtype, layout="TN", bias=bias, use_split_accumulator=self.precise
        )
        return y.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]

    def linear_dx(self, dy: Factor, weight: Factor) -> Tensor:
        """See `Kernels.linear_dx`."""
        a, b = _factor(self.weight, weight, rowwise=False), dy.matrix
        dx, *_ = self.library.general_gemm(a, b, out_dtype=dy.dtype, layout="NN", grad=True, use_split_accumulator=True)
        return dx.view(*dy.shape[:-1], -1)  # type: ignore[no-any-return]

    def linear_dw(self, dy: Factor, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """See `Kernels.linear_dw`."""
        a, b = _factor(self.x, x, rowwise=False), dy.matrix
        dw: Tensor
        dw, *_ = self.library.general_gemm(
            a, b, out_dtype=x.dtype if out is None else out.dtype, layout="NT", out=out, accumulate=add, grad=True,
            use_split_accumulator=True,
        )  # fmt: skip
        return dw


class Prepared(NamedTuple):
    """A tensor of `shape` [.., K] and `dtype` for two products: `matrix` [M, K], in eight bits in both forms."""

    matrix: Any
    shape: torch.Size
    dtype: torch.dtype


def _quantizers(recipe: str, wide_gradients: bool) -> tuple[Any, Any, Any]:
    """Of activations, weights and the gradients of outputs."""
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling
    from transformer_engine.pytorch.quantization import RecipeState

    given = Format.HYBRID if wide_gradients else Format.E4M3
    if recipe == "tensorwise":
        asked = Float8CurrentScaling(fp8_format=given)
    elif recipe == "blockwise":
        asked = Float8BlockScaling(fp8_format=given)
    else:
        asked = MXFP8BlockScaling(fp8_format=given)
    forward = RecipeState.create(asked, mode="forward", num_quantizers=3)  # the third is of the output
    backward = RecipeState.create(asked, mode="backward", num_quantizers=2)
    return (*forward.make_quantizers()[:2], backward.make_quantizers()[0])


def _factor(quantizer: Any, x: Factor, *, rowwise: bool) -> Any:
    """A matrix for a product that sums over its last axis, which is by rows, or its first."""
    return x.matrix if isinstance(x, Prepared) else _matrix(quantizer, x, rowwise=rowwise, columnwise=not rowwise)


def _prepared(quantizer: Any, x: Tensor) -> Prepared:
    return Prepared(_matrix(quantizer, x, rowwise=True, columnwise=True), x.shape, x.dtype)


def _matrix(quantizer: Any, x: Tensor, **usage: bool) -> Any:
    matrix = x.flatten(0, -2).contiguous()
    if quantizer is None:
        return matrix
    quantizer.set_usage(**usage)
    return quantizer(matrix)


class TeAttention:
    """`WholeAttention` by its module, of which one is kept for each shape met."""

    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        self.library = te
        self.modules: dict[tuple[object, ...], Any] = {}

    def takes(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, how: Scores) -> bool:
        """See `WholeAttention.takes`."""
        band = mask.band if isinstance(mask, Packed) else mask
        return fits_gpu(q, v) and band.right == 0 and q.shape[1] == k.shape[1] and not how.bent

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, how: Scores) -> Tensor:
        """See `WholeAttention.__call__`."""
        band = mask.band if isinstance(mask, Packed) else mask
        documents = isinstance(mask, Packed)
        key = (q.shape[2:], k.shape[2:], v.shape[2:], band, how.scale, documents)
        module = self.modules.get(key)
        if module is None:
            module = self.modules[key] = self.library.DotProductAttention(
                q.shape[2], (q.shape[3], v.shape[3]), num_gqa_groups=k.shape[2],
                qkv_format="thd" if documents else "bshd", attn_mask_type="padding_causal" if documents else "causal",
                window_size=(-1 if band.left is None else band.left, 0), softmax_scale=how.scale,
            )  # fmt: skip
        shape = (*q.shape[:3], v.shape[-1])
        if not isinstance(mask, Packed):
            return module(q, k, v).view(shape)  # type: ignore[no-any-return]
        starts, longest = mask.cu_seqlens, max(mask.lengths)
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        y = module(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest)
        return y.view(shape)  # type: ignore[no-any-return]
