"""Interface of kernel back ends. The reference is plain torch, on any device; the others must agree with it.

Legend: B batch, S query length, T key length, H query heads, K key/value heads, d head size, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from mega_trainer.kernels.attention_masks import AttentionMaskSpec, PagedAttentionName, VisiblePagedKeys
from mega_trainer.kernels.gated_delta_rule import DeltaRuleInputs
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.kernels.selective_scan import ScanInputs
from mega_trainer.kernels.sequence_chunks import SequenceChunks


@dataclass(frozen=True)
class RelativePositionBias:
    """Attention bias that depends on head and distance between key and query, as a table of values by distance.

    Attributes:
        values: [H, n]; the score of a key r positions after its query (negative: before it) gets `values[:, zero + r]`.
        zero: index for a key at its query's position. Query i of S is at position i + T - S, as in `BandMask`.
    """

    values: Tensor
    zero: int

    def compute_relative_bias_indices(self, queries: range, keys: range, ahead: int) -> Tensor:
        """Return the index into `values` of each query and key, int64 [queries, keys]; `ahead` is all keys minus all queries."""
        at = torch.arange(queries.start, queries.stop, device=self.values.device) + (ahead - self.zero)
        return torch.arange(keys.start, keys.stop, device=self.values.device) - at[:, None]

    def materialize_bias(self, queries: int, keys: int) -> Tensor:
        """Return the whole relative position bias, [heads, queries, keys].
        It is for queries that end at the last key.
        """
        return self.values[:, self.compute_relative_bias_indices(range(queries), range(keys), keys - queries)]

    def select_heads(self, heads: slice) -> RelativePositionBias:
        """Return the relative position bias of a slice of the heads."""
        return RelativePositionBias(self.values[heads], self.zero)


@dataclass(frozen=True)
class AttentionScoreTransform:
    """Transform of attention scores, the dot products of queries and keys, before the softmax.

    Attributes:
        scale: factor on the scores.
        softcap: scores become cap tanh(score / cap).
        sinks: [H], an extra score per head in the softmax, without a value (arXiv:2309.17453).
        bias: bias of this rank's heads, added to the scaled scores; not used with a soft cap.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: RelativePositionBias | None = None

    @property
    def has_unfused_terms(self) -> bool:
        """True if scores have terms that fused kernels do not support: soft cap, sinks or bias."""
        return self.softcap is not None or self.sinks is not None or self.bias is not None


class WholeSequenceAttentionKernel(Protocol):
    """Differentiable attention kernel for whole sequences, for the calls that it supports."""

    def supports_call(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform
    ) -> bool:
        """Return whether the kernel supports attention with these operands, mask and scores."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform
    ) -> Tensor:
        """Compute attention, differentiable, with the arguments of `Kernels.attention`."""


@dataclass(frozen=True)
class RotaryAngles:
    """Cosine and sine of the rotary angles: [B or 1, S, 1, r/2] for r rotated elements per head."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @cached_property
    def duplicated_cos_sin(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each repeated for both rotated halves, the first half's sine negated: each [B or 1, S, 1, r]."""
        return torch.cat([self.cos, self.cos], -1), torch.cat([-self.sin, self.sin], -1)


# Operand of two GEMMs: a tensor, or an object that the back end has prepared from it for both.
GemmOperand = Any


class Kernels(Protocol):
    """Interface of kernel back ends: the operations that transformer layers consist of."""

    def prepare_weight(self, weight: Tensor) -> GemmOperand:
        """Prepare a weight W [N, D] (for example quantise it) for the GEMMs of a linear layer.
        The result is for `linear_forward` and `linear_dgrad`, which also accept W itself; it is valid until W changes.
        """

    def prepare_grouped_weight(self, weight: Tensor) -> GemmOperand:
        """Prepare a stack of weights W [G, N, D] (for example quantise it) for `grouped_linear` and `grouped_dgrad`."""

    def prepare_gradient(self, dy: Tensor) -> GemmOperand:
        """Prepare an output gradient dY [.., N] (for example quantise it) for `linear_dgrad` and `linear_wgrad`."""

    def linear_forward(self, x: Tensor, weight: GemmOperand, bias: Tensor | None = None) -> Tensor:
        """Return the output Y = X W^T + b of a linear layer: [.., D] x [N, D] -> [.., N].
        It is not differentiable by itself; see `parallel.parallel_linear`.
        """

    def linear_dgrad(self, dy: GemmOperand, weight: GemmOperand) -> Tensor:
        """Return a linear layer's input gradient dX = dY W: [.., N] x [N, D] -> [.., D]; dY from `prepare_gradient`."""

    def linear_wgrad(self, dy: GemmOperand, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Return a linear layer's weight gradient dW = dY^T X [N, D], written, or with `add` added, to `out` if given.
        It is summed over tokens: [.., N] x [.., D] -> [N, D]. dY may be from `prepare_gradient`, and `out` may be wider.
        """

    def grouped_linear(self, x: Tensor, weight: GemmOperand, rows: GroupedRows) -> Tensor:
        """Multiply each row by its group's (expert's) matrix (grouped GEMM): [M, D] x [G, N, D] -> [M, N]."""

    def grouped_dgrad(self, dy: Tensor, weight: GemmOperand, rows: GroupedRows) -> Tensor:
        """Return the gradient of x in `grouped_linear`: [M rows, N] x [G groups, N, D] -> [M, D]."""

    def grouped_wgrad(
        self, dy: Tensor, x: Tensor, rows: GroupedRows, out: Tensor | None = None, *, add: bool = False
    ) -> Tensor:
        """Return a grouped linear layer's weight gradient, dY^T X over each group's rows, in or added to `out` if given.
        The layer is `grouped_linear`; shapes are [M, N] x [M, D] -> [G, N, D], and the gradient of a group without rows
        is zero.

        `out` and `add` as for `linear_wgrad`.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        """Return the RMSNorm x / rms(x) * weight over the last axis (arXiv:1910.07467), statistics in at least fp32.

        With `zero_centered` the factor is 1 + weight, and the multiplication is also in at least fp32, as in Gemma.
        """

    def add_rms_norm(
        self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the sum x + y (x without y) and its `rms_norm`; one kernel computes the gradients of both."""

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
    ) -> Tensor:
        """Return the LayerNorm (x - mean) / std * weight + bias over the last axis (arXiv:1607.06450).

        `zero_centered` as for `rms_norm`.
        """

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | AttentionMaskSpec, how: AttentionScoreTransform
    ) -> Tensor:
        """Compute scaled dot-product attention with grouped queries (GQA), a `mask` and transformed scores (`how`).

        q [B, S, H, d], k [B, T, K, d] and v [B, T, K, e] with H a multiple of K -> [B, S, H, e]. A `mask` tensor is
        boolean, broadcastable to [B, H, S, T], True where a query attends to a key.
        """

    def decode_attention(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> Tensor:
        """Compute attention of one query per batch row to all cached keys of that row, in generation.

        q [N, H, d], keys [1, K, T_i, d], values [1, K, T_i, e] -> [N, H, e]. Not differentiable, for low host overhead.
        """

    def paged_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: VisiblePagedKeys,
        how: AttentionScoreTransform,
        name: PagedAttentionName,
    ) -> Tensor:
        """Compute attention of one query per row to that row's pages of a KV cache, for all rows in one call.
        `name` is an implementation that supports the call (`paged_attention.supports_paged_attention`), not `rows`.

        q [N, H, d], whole cache keys [slots, K, d] and values [slots, K, e] -> [N, H, e]. Not differentiable.
        """

    def attend_block(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform
    ) -> tuple[Tensor, Tensor]:
        """Return the attention to some of the keys and the log-sum-exp of scores, without sinks, to be merged with other blocks.
        The caller also applies attention sinks.

        Shapes as for `attention`. Returns y [B, S, H, e], in at least the precision of q, and the log-sum-exp of the
        scores [B, S, H], in at least fp32. Every query must attend to a key. Not differentiable.
        """

    def attend_block_backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        y: Tensor,
        lse: Tensor,
        mask: AttentionMaskSpec,
        how: AttentionScoreTransform,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the part of the gradients (dq, dk, dv) that comes from one block of keys, each shaped as its operand.

        y [B, S, H, e] and `lse` [B, S, H] are over all blocks, sinks included: with p = exp(score - lse) and delta the
        sum of y dy over each head, the gradient of a score is p (dy v - delta) (arXiv:2205.14135).
        """

    def gated_activation(
        self, gate_up: Tensor, activation: str, limit: float | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """Return act(gate) * up for a fused [.., 2F] -> [.., F]: swiglu, geglu, geglu_erf (arXiv:2002.05202) or reglu2.

        With a `limit`, gate <= limit and |up| <= limit: swiglu is then GPT-OSS's, gate sigmoid(1.702 gate) (up + 1), and
        clamped_swiglu is silu(gate) up. Rows are multiplied by `weights` [..], in at least fp32.
        """

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
        """Return the causal depthwise convolution with k taps of each channel at each token, and its SiLU if `silu`.
        The convolution is b + sum_j w[j] x[t - k + 1 + j] at token t.

        x [B, S, c], weight [c, k], bias [c] -> [B, S, c]. `before` are the k - 1 tokens before x [B, k - 1, c], zeros by
        default. `preceding_tokens` int64 [B, S] is the number of earlier tokens in each token's document; other tokens
        count as zero.
        """

    def selective_scan(
        self, steps: ScanInputs, chunks: SequenceChunks, states: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the outputs [B, S, heads, channels] of Mamba-2's recurrence, or of Mamba-1's by the shape of `decay`.
        They have at least the precision of x; `states` passes states between chunks (a `ScanPass`).
        """

    def gated_delta_rule(
        self, updates: DeltaRuleInputs, chunks: SequenceChunks, states: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return the outputs of the gated delta rule, [B, S, heads, channels].
        They have at least the precision of v; `states` passes states between chunks (a `DeltaRulePass`).
        """

    def apply_rotary(self, x: Tensor, rotation: RotaryAngles) -> Tensor:
        """Rotate the first r elements of each head of x [B, S, H, d] by the rotary angles.
        The angles have r/2 values per token.
        """

    def apply_rotary_qkv(
        self, qkv: Tensor, rotation: RotaryAngles, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split a fused projection [B, S, H + 2K, d] into rotated queries, rotated keys, and values.
        H is `heads` and K is `kv_heads`.

        The fused tensor is not saved for the backward.
        """
