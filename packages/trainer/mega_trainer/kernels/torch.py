"""The reference back end: plain torch, on any device and in any precision."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


class TorchKernels:
    """`Kernels` in terms of torch's own operations."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `Kernels.linear`."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See `Kernels.layer_norm`."""
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """See `Kernels.attention`."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return y.transpose(1, 2)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """See `Kernels.gated`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up
