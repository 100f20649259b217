"""What a kernel back end offers. The reference is plain torch, on any device; the others must agree with it.

Legend: B batch, S query length, T key length, H query heads, K key/value heads, d head size, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from mega_trainer.kernels.bias import DistanceBias
from mega_trainer.kernels.chunks import Chunks
from mega_trainer.kernels.delta_rule import Updates
from mega_trainer.kernels.grouped import Rows
from mega_trainer.kernels.masks import Mask
from mega_trainer.kernels.scan import Steps


@dataclass(frozen=True)
class Scores:
    """What becomes of the product of a query and a key, before the softmax.

    Attributes:
        scale: a factor on it.
        softcap: the score then becomes cap tanh(score / cap).
        sinks: [H], a further score of each head in its softmax, which takes no value (arXiv:2309.17453).
        bias: of this rank's heads, added to it; there is no soft cap then.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: DistanceBias | None = None

    @property
    def bent(self) -> bool:
        """Whether something becomes of it that fused kernels do not know."""
        return any(each is not None for each in (self.softcap, self.sinks, self.bias))


class WholeAttention(Protocol):
    """Attention of whole sequences, differentiable, in the cases that it is made for."""

    def takes(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, how: Scores) -> bool:
        """Whether this is one."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, how: Scores) -> Tensor:
        """See `Kernels.attention`."""


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the angles: [B or 1, S, 1, r/2] for r rotated elements a head."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @cached_property
    def whole(self) -> tuple[Tensor, Tensor]:
        """cos of both halves of the rotated elements, and sin, of the first half with the other sign: [B or 1, S, 1, r] both."""
        return torch.cat([self.cos, self.cos], -1), torch.cat([-self.sin, self.sin], -1)


# A factor of two products, as a tensor or as what the back end has prepared of it for both.
Factor = Any


class Kernels(Protocol):
    """The operations a decoder block is made of."""

    def prepare_weight(self, weight: Tensor) -> Factor:
        """W [N, D] for `linear` and `linear_dx`, which take it unprepared, too; good until W changes."""

    def prepare_grouped_weight(self, weight: Tensor) -> Factor:
        """W [G, N, D] so, for `grouped_linear` and `grouped_dx`."""

    def prepare_gradient(self, dy: Tensor) -> Factor:
        """dY [.., N] as `linear_dx` and `linear_dw` take it."""

    def linear(self, x: Tensor, weight: Factor, bias: Tensor | None = None) -> Tensor:
        """Y = X W^T + b: [.., D] x [N, D] -> [.., N]. This and its gradients are differentiated by `parallel.linear`."""

    def linear_dx(self, dy: Factor, weight: Factor) -> Tensor:
        """dX = dY W: [.., N] x [N, D] -> [.., D]; dY prepared."""

    def linear_dw(self, dy: Factor, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """dW = dY^T X, summed over tokens: [.., N] x [.., D] -> [N, D]; dY prepared.

        Into `out` where that is given, which may be of a wider dtype; with `add` to what is there. Returns it.
        """

    def grouped_linear(self, x: Tensor, weight: Factor, rows: Rows) -> Tensor:
        """Each row by its group's matrix: [M, D] x [G, N, D] -> [M, N]."""

    def grouped_dx(self, dy: Tensor, weight: Factor, rows: Rows) -> Tensor:
        """[M, N] x [G, N, D] -> [M, D]."""

    def grouped_dw(self, dy: Tensor, x: Tensor, rows: Rows, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Sum of each group's outer products, zero where it has no rows: [M, N] x [M, D] -> [G, N, D].

        `out` and `add` as for `linear_dw`.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        """x / rms(x) * weight over the last axis (arXiv:1910.07467), statistics in at least fp32.

        With `zero_centered` the factor is 1 + weight, and the product too is in at least fp32, as in Gemma.
        """

    def add_rms_norm(
        self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The residual stream x, or x + y, and its `rms_norm`; the gradient of both is made at once."""

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
    ) -> Tensor:
        """(x - mean) / std * weight + bias over the last axis (arXiv:1607.06450); `zero_centered` as for `rms_norm`."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Mask, how: Scores) -> Tensor:
        """Scaled dot-product attention with grouped queries.

        q [B, S, H, d], k [B, T, K, d] and v [B, T, K, e] with H a multiple of K -> [B, S, H, e]. Where `mask` is a
        tensor it is boolean, broadcastable to [B, H, S, T], True where a query sees a key.
        """

    def attention_of_rows(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> Tensor:
        """One query of each of N rows to all keys of that row: q [N, H, d], keys [1, K, T_i, d], values [1, K, T_i, e] ->
        [N, H, e]. Not differentiable: generation's, where what a call costs the host counts.
        """

    def attend_block(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, how: Scores) -> tuple[Tensor, Tensor]:
        """Attention to some of the keys, for one who merges blocks; without sinks, which belong to the whole.

        Shapes as for `attention`. Returns y [B, S, H, e], in at least the precision of q, and the logarithm of the sum of
        exponentiated scores [B, S, H], in at least fp32. Every query must see a key. Not differentiable.
        """

    def attend_block_backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, mask: Mask, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The part of (dq, dk, dv) that comes from one block, each shaped as its operand.

        y [B, S, H, e] and `lse` [B, S, H] are those of all blocks together, sinks included: with p = exp(score - lse) and
        delta the sum of y dy over each head, the gradient of a score is p (dy v - delta) (arXiv:2205.14135).
        """

    def gated(
        self, gate_up: Tensor, activation: str, limit: float | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """act(gate) * up for a fused [.., 2F] -> [.., F]: swiglu, geglu or geglu_erf (arXiv:2002.05202).

        With a `limit` it is swiglu as in GPT-OSS: gate sigmoid(1.702 gate) (up + 1), with gate <= limit, |up| <= limit.
        `weights` [..] in at least fp32 are factors of the rows.
        """

    def short_conv(
        self, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, reach: Tensor | None
    ) -> Tensor:
        """silu(b + sum_j w[j] x[t - k + 1 + j]) for each channel: x [B, S, c], weight [c, k], bias [c] -> [B, S, c].

        `before` are the k - 1 tokens before x [B, k - 1, c], zeros by default; `reach` int64 [B, S] says how many tokens of
        its document stand before each token, of which alone it sees any.
        """

    def scan(self, steps: Steps, chunks: Chunks, states: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Mamba-2's recurrence, [B, S, H, P] in at least the precision of x; `states` as `scan.Pass`."""

    def delta_rule(self, updates: Updates, chunks: Chunks, states: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """The gated delta rule, [B, S, H, V] in at least the precision of v; `states` as `delta_rule.Pass`."""

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """The first r elements of each head of x [B, S, H, d] rotated."""

    def rotate_qkv(self, qkv: Tensor, rotation: Rotation, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values of a fused [B, S, H + 2K, d], which is not kept for the backward."""
