"""Norms of the residual stream, and of queries and keys.

Legend: B batch, S sequence, D model width, H heads, d head size, T tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.kernel_interface import Kernels
from mega_trainer.parallel.tensor_parallel import sum_input_gradient, sum_partial_results


class Norm(nn.Module):
    """RMSNorm, or with `layer` LayerNorm, over the last axis; `zero_centered` norms multiply by 1 + weight."""

    def __init__(
        self,
        kernels: Kernels,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        eps: float,
        *,
        zero_centered: bool = False,
        layer: bool = False,
    ) -> None:
        super().__init__()
        self.kernels, self.eps, self.zero_centered, self.layer = kernels, eps, zero_centered, layer
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [.., D] over the last axis."""
        return self.add_and_norm(x)[1]

    def add_and_norm(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum x + y (x without y) and its norm, all [.., D].
        Forward and backward are one kernel each if the back end has it.
        """
        if not self.layer:
            return self.kernels.add_rms_norm(x, y, self.weight, self.eps, zero_centered=self.zero_centered)
        x = x if y is None else x + y
        return x, self.kernels.layer_norm(x, self.weight, self.bias, self.eps, zero_centered=self.zero_centered)


class AllHeadsRMSNorm(nn.Module):
    """RMSNorm of queries or keys over all heads of a token together, which are split evenly over the ranks of `group`.

    The mean of squares is averaged over the ranks, and its gradient is summed over them. Heads that several ranks hold
    count the same number of times each, which does not change the mean.
    """

    def __init__(self, weight: nn.Parameter, eps: float, group: CommGroup, *, zero_centered: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.group, self.zero_centered = weight, eps, group, zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this rank's query or key heads [B, S, H/T, d] over all H heads, which T ranks split.
        Statistics are in at least fp32.
        """
        wide = upcast_to_fp32(x.flatten(-2))
        mean = wide.square().mean(-1, keepdim=True) / self.group.size
        mean = sum_input_gradient(sum_partial_results(mean, self.group, sp=False), self.group)
        factor = 1 + self.weight.to(wide.dtype) if self.zero_centered else self.weight
        return (wide * torch.rsqrt(mean + self.eps) * factor).to(x.dtype).view_as(x)


class PerHeadLayerNorm(nn.Module):
    """LayerNorm of queries or keys without bias over each head, with a weight that differs by head.
    The weight is [H/T, d] (H heads over T tensor ranks).
    """

    def __init__(self, weight: nn.Parameter, eps: float, *, zero_centered: bool) -> None:
        super().__init__()
        self.weight, self.eps, self.zero_centered = weight, eps, zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each head of [B, S, H/T, d] (H heads over T tensor ranks); statistics in at least fp32."""
        wide = upcast_to_fp32(x)
        factor = 1 + self.weight.to(wide.dtype) if self.zero_centered else self.weight
        return (F.layer_norm(wide, x.shape[-1:], eps=self.eps) * factor).to(x.dtype)


class PlainNorm(nn.Module):
    """RMSNorm, or with `layer` LayerNorm, over the last axis without weight and bias."""

    def __init__(self, eps: float, *, layer: bool = False) -> None:
        super().__init__()
        self.eps, self.normalize = eps, F.layer_norm if layer else F.rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [.., D] over the last axis; statistics in at least fp32."""
        return self.normalize(upcast_to_fp32(x), x.shape[-1:], eps=self.eps).to(x.dtype)

    def add_and_norm(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum x + y (x without y) and its norm, all [.., D]."""
        x = x if y is None else x + y
        return x, self(x)


class ExtensionNorm(nn.Module):
    """Norm of the residual stream by an extension's `normalize(x, weight, eps)`, with a weight [D] or None."""

    def __init__(self, normalize: Callable[..., Tensor], weight: nn.Parameter | None, eps: float) -> None:
        super().__init__()
        self.normalize, self.weight, self.eps = normalize, weight, eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [.., D] over the last axis."""
        return self.normalize(x, self.weight, self.eps).to(x.dtype)

    def add_and_norm(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum x + y (x without y) and its norm, all [.., D]."""
        x = x if y is None else x + y
        return x, self(x)
