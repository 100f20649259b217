"""Reference back end: plain torch, on any device and in any precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.kernels import (
    blockwise_attention,
    fused_elementwise,
    gemm_accumulation,
    grouped_gemm,
    short_convolution,
)
from mega_trainer.kernels.attention_masks import (
    ALL,
    CAUSAL,
    AttentionMaskSpec,
    BandMask,
    PagedAttentionName,
    VisiblePagedKeys,
    materialize_dense_mask,
)
from mega_trainer.kernels.channel_scan import channel_scan
from mega_trainer.kernels.flash_attention import FlashKernel, TorchFlashKernel
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.kernels.kernel_interface import (
    AttentionScoreTransform,
    GemmOperand,
    RotaryAngles,
    WholeSequenceAttentionKernel,
)
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.kernels.paged_attention import attend_gathered_pages, attend_paged_flash
from mega_trainer.kernels.recurrent_libraries import RecurrentLibraries
from mega_trainer.kernels.selective_scan import ScanInputs, selective_scan
from mega_trainer.kernels.sequence_chunks import SequenceChunks

FEW_QUERIES = 16  # most queries whose mask is small compared to their keys


class TorchKernels:
    """Kernel back end that uses torch's own operations.

    Args:
        leaves: calls the fusible functions: operations other than GEMMs and attention.
        flash: attention kernel for blocks; default: torch's.
        whole: preferred attention kernel for whole sequences; default: torch's choice, or none if `flash` is given.
        recurrent: libraries for recurrent mixers.
    """

    def __init__(
        self,
        leaves: FusibleFunctionCompiler | None = None,
        flash: FlashKernel | None = None,
        whole: WholeSequenceAttentionKernel | None = None,
        recurrent: RecurrentLibraries | None = None,
    ) -> None:
        self.recurrent = recurrent or RecurrentLibraries()
        self.leaves, self.flash = leaves or FusibleFunctionCompiler(), flash or TorchFlashKernel()
        self.whole = whole or (SdpaAttention() if flash is None else None)

    def prepare_weight(self, weight: Tensor) -> GemmOperand:
        """Return the weight unchanged."""
        return weight

    def prepare_grouped_weight(self, weight: Tensor) -> GemmOperand:
        """Return the stack of weights unchanged."""
        return weight

    def prepare_gradient(self, dy: Tensor) -> GemmOperand:
        """Return the output gradient dY unchanged."""
        return dy

    def linear_forward(self, x: Tensor, weight: GemmOperand, bias: Tensor | None = None) -> Tensor:
        """Return Y = X W^T + b."""
        return F.linear(x, weight, bias)

    def linear_dgrad(self, dy: GemmOperand, weight: GemmOperand) -> Tensor:
        """Return the input gradient dX = dY W."""
        dx: Tensor = dy.matmul(weight)
        return dx

    def linear_wgrad(self, dy: GemmOperand, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Return the weight gradient dW = dY^T X, written, or with `add` added, to `out` if given."""
        return gemm_accumulation.gemm_into(dy.flatten(0, -2).t(), x.flatten(0, -2), out, add=add)

    def grouped_linear(self, x: Tensor, weight: GemmOperand, rows: GroupedRows) -> Tensor:
        """Multiply each row by its group's matrix."""
        return grouped_gemm.grouped_gemm(x, weight.mT, rows)

    def grouped_dgrad(self, dy: Tensor, weight: GemmOperand, rows: GroupedRows) -> Tensor:
        """Return the input gradient of `grouped_linear`."""
        return grouped_gemm.grouped_gemm(dy, weight, rows)

    def grouped_wgrad(
        self, dy: Tensor, x: Tensor, rows: GroupedRows, out: Tensor | None = None, *, add: bool = False
    ) -> Tensor:
        """Return the weight gradient of `grouped_linear`, in or added to `out` if given."""
        return grouped_gemm.grouped_wgrad_gemm(dy, x, rows, out, add=add)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        """Return the RMSNorm of x over the last axis, multiplied by the weight."""
        return self.add_rms_norm(x, None, weight, eps, zero_centered=zero_centered)[1]

    def add_rms_norm(
        self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return x + y (x without y) and its RMSNorm over the last axis."""
        return fused_elementwise.add_rms_norm(x, y, weight, eps, zero_centered, self.leaves)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
    ) -> Tensor:
        """Return the LayerNorm of x over the last axis, with weight and bias."""
        if zero_centered:
            offset = None if bias is None else upcast_to_fp32(bias)
            return F.layer_norm(upcast_to_fp32(x), (x.shape[-1],), 1 + upcast_to_fp32(weight), offset, eps).to(x.dtype)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | AttentionMaskSpec, how: AttentionScoreTransform
    ) -> Tensor:
        """Compute scaled dot-product attention by the whole-sequence kernel, else block by block.
        The whole-sequence kernel is used if it supports the call; see `Kernels.attention`.
        """
        if isinstance(mask, Tensor):
            return reference_attention(q, k, v, mask, how) if how.has_unfused_terms else _sdpa(q, k, v, mask, how.scale)
        if self.whole is not None and self.whole.supports_call(q, k, v, mask, how):
            return self.whole(q, k, v, mask, how)
        return blockwise_attention.blockwise_attention(self.flash, q, k, v, mask, how)

    def decode_attention(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> Tensor:
        """Compute attention of one query per batch row to all cached keys of that row, in generation.

        Heads that share a key become queries of that key, so that it is read once.
        """
        rows = q.view(len(q), keys[0].shape[1], -1, q.shape[-1])
        attend = partial(F.scaled_dot_product_attention, scale=scale)
        if len(keys) == 1:
            return attend(rows, keys[0], values[0]).flatten(1, 2)
        return torch.cat(list(map(attend, torch.split(rows, 1), keys, values))).flatten(1, 2)

    def paged_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        rows: VisiblePagedKeys,
        how: AttentionScoreTransform,
        name: PagedAttentionName,
    ) -> Tensor:
        """Compute attention of one query per row to a paged KV cache, by torch's flash kernel or a gathered batch."""
        attend = attend_paged_flash if name == "flash" else attend_gathered_pages
        return attend(q, keys, values, rows, how)

    def attend_block(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform
    ) -> tuple[Tensor, Tensor]:
        """Return the attention to one block of keys, and the log-sum-exp of its scores."""
        return blockwise_attention.attend_block(self.flash, q, k, v, mask, how)

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
        """Return the gradients of q, k and v from one block of keys."""
        return blockwise_attention.attend_block_backward(self.flash, dy, q, k, v, y, lse, mask, how)

    def gated_activation(
        self, gate_up: Tensor, activation: str, limit: float | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """Return act(gate) * up for a fused gate and up, with rows multiplied by `weights` if given."""
        return fused_elementwise.gated_activation(gate_up, weights, activation, limit, self.leaves)

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
        """Convolve each channel of x causally with a few taps, by causal-conv1d if the run uses it."""
        if self.recurrent.conv is not None:
            return self.recurrent.conv(x, before, weight, bias, preceding_tokens, silu=silu)
        return short_convolution.short_convolution(x, before, weight, bias, preceding_tokens, silu, self.leaves)

    def selective_scan(
        self, steps: ScanInputs, chunks: SequenceChunks, states: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Compute the selective scan of Mamba-2 or Mamba-1, of whole sequences by mamba-ssm if the run uses it."""
        if chunks.whole and self.recurrent.scan is not None and self.recurrent.scan.supports(steps, chunks):
            return self.recurrent.scan(steps, chunks)
        return (selective_scan if steps.decay.dim() == 1 else channel_scan)(steps, chunks, states)

    def gated_delta_rule(
        self, updates: DeltaRuleInputs, chunks: SequenceChunks, states: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Compute the gated delta rule, of whole sequences by flash-linear-attention if the run uses it."""
        if chunks.whole and self.recurrent.delta is not None:
            return self.recurrent.delta(updates, chunks)
        return gated_delta_rule(updates, chunks, states)

    def apply_rotary(self, x: Tensor, rotation: RotaryAngles) -> Tensor:
        """Rotate the heads of x by rotary angles."""
        return fused_elementwise.apply_rotary(x, rotation, [x.shape[-2]], 1, self.leaves)[0]

    def apply_rotary_qkv(
        self, qkv: Tensor, rotation: RotaryAngles, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split fused queries, keys and values, and rotate queries and keys."""
        q, k, v = fused_elementwise.apply_rotary(qkv, rotation, [heads, kv_heads, kv_heads], 2, self.leaves)
        return q, k, v


class SdpaAttention:
    """Attention kernel for whole sequences, causal or full, by torch's scaled_dot_product_attention.

    Also of a few queries to cached keys, for generation on a CPU.
    """

    def supports_call(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform
    ) -> bool:
        """Return whether scores are plain and the mask full or causal or, on a CPU without gradients, a band of <= 16 queries."""
        if how.has_unfused_terms or _is_full_or_causal(q, k, mask):
            return not how.has_unfused_terms
        few = q.shape[1] <= FEW_QUERIES and not torch.is_grad_enabled() and q.device.type == "cpu"
        return few and isinstance(mask, BandMask)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform
    ) -> Tensor:
        """Compute attention by scaled_dot_product_attention, with the arguments of `Kernels.attention`."""
        if _is_full_or_causal(q, k, mask):
            return _sdpa(q, k, v, None, how.scale, causal=mask == CAUSAL)
        assert isinstance(mask, BandMask)
        return _attend_few_queries(q, k, v, mask, how.scale)


def _is_full_or_causal(q: Tensor, k: Tensor, mask: AttentionMaskSpec) -> bool:
    """Return whether the mask is full or causal, so that torch needs no mask tensor."""
    return mask == ALL or (mask == CAUSAL and q.shape[1] == k.shape[1])


def _attend_few_queries(q: Tensor, k: Tensor, v: Tensor, band: BandMask, scale: float) -> Tensor:
    """Attend as `_sdpa`, with heads that share a key as queries of it, so that the key is read once."""
    batch, queries, heads, size = q.shape
    keys, kv_heads = k.shape[1:3]
    rows = q.view(batch, queries, kv_heads, -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    unseen = _additive_mask(band, queries, keys, heads // kv_heads, q.dtype)
    y = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=unseen, scale=scale)
    return y.view(batch, kv_heads, -1, queries, y.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)


@lru_cache(8)
def _additive_mask(band: BandMask, queries: int, keys: int, times: int, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [1, 1, times * queries, keys], minus infinity for masked keys; cached for all layers."""
    seen = materialize_dense_mask(band, (1, queries), keys, torch.device("cpu")).repeat(1, 1, times, 1)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool = False) -> Tensor:
    """Attend: [B, S, H, d], [B, T, K, d] and [B, T, K, e] -> [B, S, H, e]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | AttentionMaskSpec,
    how: AttentionScoreTransform,
    drop: Callable[[Tensor], Tensor] = lambda probabilities: probabilities,
    modify: Callable[[Tensor], Tensor] = lambda scores: scores,
) -> Tensor:
    """Compute attention unfused, with optional dropout and score modification, which fused kernels do not have.
    Arguments and result are as in `Kernels.attention`.

    `drop` is applied to the probabilities [B, H, S, T], `modify` to the scores before the mask.
    """
    heads, keys = q.shape[2], k.shape[2]
    if not isinstance(mask, Tensor):
        mask = materialize_dense_mask(mask, q.shape, k.shape[1], q.device)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // keys, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * how.scale
    if how.bias is not None:
        scores = scores + how.bias.materialize_bias(scores.shape[-2], scores.shape[-1])
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    scores = modify(scores).masked_fill(~mask, float("-inf"))
    if how.sinks is not None:
        sinks = how.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        p = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        p = scores.softmax(-1)
    return (drop(p) @ v).transpose(1, 2)
