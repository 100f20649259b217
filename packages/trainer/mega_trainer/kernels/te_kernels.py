"""Transformer Engine: its GEMMs for linear layers, also in its fp8 recipes, and its attention, which is cuDNN's.

Transformer Engine's linear modules own their weights, which does not fit tensor pieces and flat buffers. So linear layers
call its GEMM directly; attention, which has no weights, uses the module. The library is imported only where it is used.

Legend: M tokens in any number of axes, D input width, N output width; B batch, S sequence, H query heads, K key/value heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mega_trainer.kernels.attention_masks import AttentionMaskSpec, PackedDocumentMask
from mega_trainer.kernels.flash_attention import FlashKernel, supports_fused_attention_on_gpu
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, GemmOperand, WholeSequenceAttentionKernel
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.kernels.recurrent_libraries import RecurrentLibraries
from mega_trainer.kernels.torch_kernels import TorchKernels


class TeLinearKernels(TorchKernels):
    """Kernel back end whose linear layers use Transformer Engine's GEMMs, in fp8 or NVFP4 if a recipe is set.

    In fp8, M, D and N must be multiples of 16 (MXFP8 and NVFP4: 32).

    Args:
        recipe: tensorwise, blockwise, mxfp8 or nvfp4: quantisation of both operands of each GEMM by their current values
            ("current scaling"); None: no quantisation.
        wide_gradients: output gradients are in e5m2, all else in e4m3.
    """

    def __init__(
        self,
        leaves: FusibleFunctionCompiler | None = None,
        flash: FlashKernel | None = None,
        whole: WholeSequenceAttentionKernel | None = None,
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
        self.x, self.weight, self.dy = _make_quantizers(recipe, wide_gradients) if recipe else (None, None, None)
        self.precise = recipe == "blockwise"  # block scales are applied during the accumulation

    def prepare_weight(self, weight: Tensor) -> GemmOperand:
        """Return a linear layer's weight as operand of Transformer Engine's GEMMs, quantised if a recipe is set."""
        return _prepare(self.weight, weight)

    def prepare_gradient(self, dy: Tensor) -> GemmOperand:
        """Return an output gradient dY as operand of Transformer Engine's GEMMs, quantised if a recipe is set."""
        return _prepare(self.dy, dy)

    def linear_forward(self, x: Tensor, weight: GemmOperand, bias: Tensor | None = None) -> Tensor:
        """Return Y = X W^T + b by Transformer Engine's GEMM."""
        a, b = _operand(self.weight, weight, rowwise=True), _operand(self.x, x, rowwise=True)
        y, *_ = self.library.general_gemm(
            a, b, out_dtype=x.dtype, layout="TN", bias=bias, use_split_accumulator=self.precise
        )
        return y.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]

    def linear_dgrad(self, dy: GemmOperand, weight: GemmOperand) -> Tensor:
        """Return the input gradient dX = dY W by Transformer Engine's GEMM."""
        a, b = _operand(self.weight, weight, rowwise=False), dy.matrix
        dx, *_ = self.library.general_gemm(a, b, out_dtype=dy.dtype, layout="NN", grad=True, use_split_accumulator=True)
        return dx.view(*dy.shape[:-1], -1)  # type: ignore[no-any-return]

    def linear_wgrad(self, dy: GemmOperand, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Return the weight gradient dW = dY^T X by Transformer Engine's GEMM, in or added to `out` if given."""
        a, b = _operand(self.x, x, rowwise=False), dy.matrix
        dw: Tensor
        dw, *_ = self.library.general_gemm(
            a, b, out_dtype=x.dtype if out is None else out.dtype, layout="NT", out=out, accumulate=add, grad=True,
            use_split_accumulator=True,
        )  # fmt: skip
        return dw


class TeGemmOperand(NamedTuple):
    """Operand of two of Transformer Engine's GEMMs, quantised once for both if a recipe is set.
    It has `matrix` [M, K], in fp8 rowwise and columnwise, and the original `shape` [.., K] and `dtype`.
    """

    matrix: Any
    shape: torch.Size
    dtype: torch.dtype


def _make_quantizers(recipe: str, wide_gradients: bool) -> tuple[Any, Any, Any]:
    """Return the quantizers of activations, weights and output gradients."""
    from transformer_engine.common.recipe import (
        Float8BlockScaling,
        Float8CurrentScaling,
        Format,
        MXFP8BlockScaling,
        NVFP4BlockScaling,
    )
    from transformer_engine.pytorch.quantization import RecipeState

    scalings = {
        "tensorwise": Float8CurrentScaling, "blockwise": Float8BlockScaling, "mxfp8": MXFP8BlockScaling,
        "nvfp4": NVFP4BlockScaling,
    }  # fmt: skip
    scaling = scalings[recipe](fp8_format=Format.HYBRID if wide_gradients else Format.E4M3)
    forward = RecipeState.create(scaling, mode="forward", num_quantizers=3)  # the third is of the output
    backward = RecipeState.create(scaling, mode="backward", num_quantizers=2)
    return (*forward.make_quantizers()[:2], backward.make_quantizers()[0])


def _operand(quantizer: Any, x: GemmOperand, *, rowwise: bool) -> Any:
    """Return a GEMM operand that is summed over its last axis (rowwise), or its first."""
    if isinstance(x, TeGemmOperand):
        return x.matrix
    return _matrix(quantizer, x, rowwise=rowwise, columnwise=not rowwise)


def _prepare(quantizer: Any, x: Tensor) -> TeGemmOperand:
    return TeGemmOperand(_matrix(quantizer, x, rowwise=True, columnwise=True), x.shape, x.dtype)


def _matrix(quantizer: Any, x: Tensor, **usage: bool) -> Any:
    matrix = x.flatten(0, -2).contiguous()
    if quantizer is None:
        return matrix
    quantizer.set_usage(**usage)
    return quantizer(matrix)


class TeAttention:
    """Attention kernel for whole sequences by Transformer Engine's DotProductAttention, one module cached per shape."""

    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        self.library = te
        self.modules: dict[tuple[object, ...], Any] = {}

    def supports_call(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform
    ) -> bool:
        """Return whether the call is causal self-attention without score transforms, on supported GPU operands.
        See `WholeSequenceAttentionKernel.supports_call`.
        """
        band = mask.band if isinstance(mask, PackedDocumentMask) else mask
        return (
            supports_fused_attention_on_gpu(q, v)
            and band.right == 0
            and q.shape[1] == k.shape[1]
            and not how.has_unfused_terms
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform
    ) -> Tensor:
        """Compute attention by Transformer Engine, with the arguments of `Kernels.attention`."""
        band = mask.band if isinstance(mask, PackedDocumentMask) else mask
        documents = isinstance(mask, PackedDocumentMask)
        key = (q.shape[2:], k.shape[2:], v.shape[2:], band, how.scale, documents)
        module = self.modules.get(key)
        if module is None:
            module = self.modules[key] = self.library.DotProductAttention(
                q.shape[2], (q.shape[3], v.shape[3]), num_gqa_groups=k.shape[2],
                qkv_format="thd" if documents else "bshd", attn_mask_type="padding_causal" if documents else "causal",
                window_size=(-1 if band.left is None else band.left, 0), softmax_scale=how.scale,
            )  # fmt: skip
        shape = (*q.shape[:3], v.shape[-1])
        if not isinstance(mask, PackedDocumentMask):
            return module(q, k, v).view(shape)  # type: ignore[no-any-return]
        starts, longest = mask.cu_seqlens, max(mask.lengths)
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        y = module(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest)
        return y.view(shape)  # type: ignore[no-any-return]
