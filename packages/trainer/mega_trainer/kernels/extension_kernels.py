"""Kernels of extensions: functions that replace one operation of a kernel back end, for the calls that they support."""

from __future__ import annotations

from collections.abc import Sequence
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

    def _call(self, operation: KernelOperation, arguments: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
        """Return the result of the kernel for an operation; None if there is none, or it does not support the call."""
        kernel = self._kernels.get(operation)
        if kernel is None or not kernel.supports(*arguments, **options):
            return None
        found: Tensor = kernel.compute(*arguments, **options)
        return found

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        """Return the RMSNorm of x."""
        found = self._call("rms_norm", (x, weight, eps), {"zero_centered": zero_centered})
        return self._base.rms_norm(x, weight, eps, zero_centered=zero_centered) if found is None else found

    def add_rms_norm(
        self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return x + y and its RMSNorm."""
        if "rms_norm" not in self._kernels:
            return self._base.add_rms_norm(x, y, weight, eps, zero_centered=zero_centered)
        x = x if y is None else x + y
        return x, self.rms_norm(x, weight, eps, zero_centered=zero_centered)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
    ) -> Tensor:
        """Return the LayerNorm of x."""
        found = self._call("layer_norm", (x, weight, bias, eps), {"zero_centered": zero_centered})
        return self._base.layer_norm(x, weight, bias, eps, zero_centered=zero_centered) if found is None else found

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | AttentionMaskSpec, how: AttentionScoreTransform
    ) -> Tensor:
        """Compute scaled dot-product attention; score transforms and mask tensors are left to the other back end."""
        found = None
        if not isinstance(mask, Tensor) and not how.has_unfused_terms:
            packed = mask if isinstance(mask, PackedDocumentMask) else None
            band = mask.band if isinstance(mask, PackedDocumentMask) else mask
            bounds = {
                "left": band.left,
                "right": band.right,
                "cu_seqlens": None if packed is None else packed.cu_seqlens,
            }
            found = self._call("attention", (q, k, v), {"scale": how.scale, **bounds})
        return self._base.attention(q, k, v, mask, how) if found is None else found

    def gated_activation(
        self, gate_up: Tensor, activation: str, limit: float | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """Return act(gate) * up."""
        found = self._call("gated_activation", (gate_up, activation), {"limit": limit, "weights": weights})
        return self._base.gated_activation(gate_up, activation, limit, weights) if found is None else found

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
        """Compute the short causal convolution."""
        arguments = (x, before, weight, bias, preceding_tokens)
        found = self._call("short_convolution", arguments, {"silu": silu})
        return self._base.short_convolution(*arguments, silu=silu) if found is None else found
