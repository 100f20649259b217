"""Kernels of extensions: functions that replace one operation of a kernel back end, for the calls that they support."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mega_common.extension_entries import Kernel, KernelOperation
from mega_trainer.kernels.attention_masks import AttentionMaskSpec, PackedDocumentMask
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, Kernels


class ExtensionKernels:
    """Kernel back end in which kernels of extensions replace operations.

    Calls that such a kernel does not support, and all other operations, are those of another back end.

    Args:
        base: the other back end.
        kernels: at most one for each operation.
    """

    def __init__(self, base: Kernels, kernels: Sequence[Kernel]) -> None:
        self._base, self._kernels = base, {kernel.operation: kernel for kernel in kernels}

    def __getattr__(self, name: str) -> Any:
        """Return an operation or attribute of the other back end."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._base, name)

    def _compute(
        self, operation: KernelOperation, *arguments: Any, default: Callable[..., Tensor] | None = None, **options: Any
    ) -> Tensor:
        """Return the result of the kernel for an operation, if there is one and it supports the call.
        Otherwise it is that of `default`, which is the other back end's method with the same arguments unless given.
        """
        kernel = self._kernels.get(operation)
        function: Callable[..., Tensor] = default or getattr(self._base, operation)
        if kernel is not None and kernel.supports(*arguments, **options):
            function = kernel.compute
        return function(*arguments, **options)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        """Return the RMSNorm of x, by an extension's kernel if it supports the call."""
        return self._compute("rms_norm", x, weight, eps, zero_centered=zero_centered)

    def add_rms_norm(
        self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return x + y (x without y) and its RMSNorm, by an extension's RMSNorm kernel if there is one."""
        if "rms_norm" not in self._kernels:
            return self._base.add_rms_norm(x, y, weight, eps, zero_centered=zero_centered)
        x = x if y is None else x + y
        return x, self.rms_norm(x, weight, eps, zero_centered=zero_centered)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
    ) -> Tensor:
        """Return the LayerNorm of x, by an extension's kernel if it supports the call."""
        return self._compute("layer_norm", x, weight, bias, eps, zero_centered=zero_centered)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | AttentionMaskSpec, how: AttentionScoreTransform
    ) -> Tensor:
        """Compute scaled dot-product attention, by an extension's kernel if it supports the call.
        Score transforms and mask tensors are left to the other back end.
        """
        if isinstance(mask, Tensor) or how.has_unfused_terms:
            return self._base.attention(q, k, v, mask, how)
        band, cu_seqlens = (mask.band, mask.cu_seqlens) if isinstance(mask, PackedDocumentMask) else (mask, None)
        return self._compute(
            "attention", q, k, v, scale=how.scale, left=band.left, right=band.right, cu_seqlens=cu_seqlens,
            default=lambda *_, **__: self._base.attention(q, k, v, mask, how),
        )  # fmt: skip

    def gated_activation(
        self, gate_up: Tensor, activation: str, limit: float | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """Return act(gate) * up, by an extension's kernel if it supports the call."""
        return self._compute("gated_activation", gate_up, activation, limit=limit, weights=weights)

    def short_convolution(
        self,
        x: Tensor,
        before: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        preceding_tokens: Tensor | None,
        *,
        silu: bool = True,
    ) -> Tensor:
        """Compute the short causal convolution, by an extension's kernel if it supports the call."""
        return self._compute("short_convolution", x, before, weight, bias, preceding_tokens, silu=silu)
