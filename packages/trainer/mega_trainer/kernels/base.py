"""What a kernel back end offers. The reference is plain torch, on any device; the others must agree with it.

Legend: B batch, S query length, T key length, H query heads, K key/value heads, d head size, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What becomes of the product of a query and a key, before the softmax.

    Attributes:
        scale: a factor on it.
        softcap: the score then becomes cap tanh(score / cap).
        sinks: [H], a further score of each head in its softmax, which takes no value (arXiv:2309.17453).
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


class Kernels(Protocol):
    """The operations a decoder block is made of."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[.., D] x [N, D] -> [.., N]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last axis (arXiv:1910.07467), statistics in at least fp32."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / std * weight + bias over the last axis (arXiv:1607.06450)."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Scores) -> Tensor:
        """Scaled dot-product attention with grouped queries.

        q [B, S, H, d], k [B, T, K, d] and v [B, T, K, e] with H a multiple of K -> [B, S, H, e]. `mask` is boolean,
        broadcastable to [B, H, S, T], True where a query sees a key; None means causal, with S == T.
        """

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """act(gate) * up for a fused [.., 2F] -> [.., F]: swiglu or geglu (arXiv:2002.05202)."""
