"""Flash attention (arXiv:2205.14135, arXiv:2307.08691), one kernel each way: torch's own, flash-attn 2 or flash-attn 3.

All of them support documents and windows and return the log-sum-exp of the scores, and their backward accepts a log-sum-exp
over more keys. flash-attn also supports soft caps; version 3 (arXiv:2407.08608) is for Hopper.

Legend: B batch, S queries, T keys, N = B S tokens of documents one after another, H query heads, K key/value heads, d size of
queries and keys, e of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mega_trainer.kernels.attention_masks import ALL, CAUSAL, AttentionMaskSpec, BandMask, PackedDocumentMask
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform

WIDEST_HEAD = 256
_aten = torch.ops.aten


@dataclass(frozen=True)
class FlashAttentionCall:
    """Arguments of a flash attention kernel other than its operands: scale, soft cap, mask and document bounds.

    Attributes:
        scale, softcap: as in `AttentionScoreTransform`.
        band: band mask, of each document if there are documents.
        cu_seqlens: int32 [documents + 1], starts of the documents, and the end; the operands then are [N, heads, size].
        longest: most queries and most keys of one sequence or document.
    """

    scale: float
    softcap: float | None
    band: BandMask
    cu_seqlens: Tensor | None
    longest: tuple[int, int]

    @classmethod
    def from_mask(
        cls, mask: AttentionMaskSpec, how: AttentionScoreTransform, queries: int, keys: int
    ) -> FlashAttentionCall:
        """Return the kernel arguments for attention of `queries` queries to `keys` keys under `mask`."""
        if isinstance(mask, PackedDocumentMask):
            return cls(how.scale, how.softcap, mask.band, mask.cu_seqlens, (max(mask.lengths),) * 2)
        return cls(how.scale, how.softcap, mask, None, (queries, keys))

    @property
    def is_causal(self) -> bool:
        """True if a query attends to all keys up to its own position, and to no later ones."""
        return self.band == CAUSAL

    @property
    def window_size(self) -> tuple[int, int]:
        """Numbers of keys to the left and right of a query's position that it attends to; -1 is unbounded."""
        left, right = (-1 if side is None else side for side in (self.band.left, self.band.right))
        return left, right


class FlashKernel(Protocol):
    """Interface of flash attention kernels, which compute attention without storing the scores.

    Operands are [B, S, H, d], [B, T, K, d] and [B, T, K, e]; with documents [N, H, d], [N, K, d] and [N, K, e].
    """

    def supports_call(self, q: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform) -> bool:
        """Return whether the kernel supports attention with given operands, mask and scores.
        Attention sinks are the caller's work.
        """

    def supports_uneven_heads(self, d: int, e: int) -> bool:
        """Return whether the kernel supports value heads of size e with key heads of size d."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
        """Return the attention output [B, S, H, e] and the log-sum-exp of the scores, fp32 [B, H, S].
        For packed documents they are [N, H, e] and [H, N].
        """

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, call: FlashAttentionCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the part of the gradients of q, k and v that comes from one block of keys.
        The tensors y and lse, shaped as in `forward`, are over all keys.
        """


class TorchFlashKernel:
    """Flash attention kernel of torch on GPUs, and torch's fused attention kernel on CPUs.

    On a CPU every precision is supported, but neither documents nor windows.
    """

    def supports_call(self, q: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform) -> bool:
        """Return whether torch has a flash kernel for these operands, mask and scores; never with a soft cap."""
        if how.softcap is not None:
            return False
        # on a CPU, causal masks are aligned with the first query and key, not the last
        return (
            supports_fused_attention_on_gpu(q, v)
            if _on_gpu(q)
            else mask == ALL or (mask == CAUSAL and q.shape[1] == v.shape[1])
        )

    def supports_uneven_heads(self, d: int, e: int) -> bool:
        """Return False, since torch needs equal sizes of key and value heads."""
        return False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
        """Return the attention output and the log-sum-exp of the scores, by torch's flash kernel."""
        if not _on_gpu(q):
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            y, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, call.is_causal, scale=call.scale)
            return y.transpose(1, 2), lse
        y, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *_varlen_arguments(call), 0.0, call.is_causal, False, **_window_arguments(call)
        )
        return y, lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, call: FlashAttentionCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v by torch's flash kernel."""
        if not _on_gpu(q):
            dy, q, k, v, y = (t.transpose(1, 2) for t in (dy, q, k, v, y))
            grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dy, q, k, v, y, lse, 0.0, call.is_causal, scale=call.scale
            )
            dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
            return dq, dk, dv
        generator = torch.empty(0, dtype=torch.int64, device=q.device)  # unused: dropout is 0
        dq, dk, dv = _aten._flash_attention_backward(
            dy, q, k, v, y, lse, *_varlen_arguments(call), 0.0, call.is_causal, generator, generator,
            **_window_arguments(call),
        )  # fmt: skip
        return dq, dk, dv


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _varlen_arguments(call: FlashAttentionCall) -> tuple[Tensor | int | None, ...]:
    return call.cu_seqlens, call.cu_seqlens, *call.longest


def _window_arguments(call: FlashAttentionCall) -> dict[str, Any]:
    return {"scale": call.scale, "window_size_left": call.band.left, "window_size_right": call.band.right}


def supports_fused_attention_on_gpu(q: Tensor, v: Tensor) -> bool:
    """Return whether operands are on a GPU, in a precision and with head sizes that fused kernels support."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    return _on_gpu(q) and half and supports_flash_head_size(max(q.shape[-1], v.shape[-1]))


def supports_flash_head_size(size: int) -> bool:
    """Return whether flash attention kernels support heads of `size` elements: a multiple of 8, at most 256."""
    return size % 8 == 0 and size <= WIDEST_HEAD


class FlashAttention2:
    """Flash attention kernel of the flash-attn 2 package, for Ampere and later GPUs."""

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface

        self.library = flash_attn_interface

    def supports_call(self, q: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform) -> bool:
        """Return whether operands are on a GPU, in bf16 or fp16, with a head size that flash-attn 2 supports."""
        return supports_fused_attention_on_gpu(q, v)

    def supports_uneven_heads(self, d: int, e: int) -> bool:
        """Return False, since flash-attn 2 requires equal sizes of key and value heads.
        See `FlashKernel.supports_uneven_heads`.
        """
        return False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
        """Return the attention output and the log-sum-exp of the scores, by flash-attn 2."""
        starts, (queries, keys), (left, right) = call.cu_seqlens, call.longest, call.window_size
        cap = call.softcap or 0.0
        if starts is None:
            y, lse, *_ = self.library._flash_attn_forward(
                q, k, v, dropout_p=0.0, softmax_scale=call.scale, causal=call.is_causal,
                window_size_left=left, window_size_right=right, softcap=cap, alibi_slopes=None, return_softmax=False,
            )  # fmt: skip
        else:
            y, lse, *_ = self.library._flash_attn_varlen_forward(
                q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=queries, max_seqlen_k=keys,
                dropout_p=0.0, softmax_scale=call.scale, causal=call.is_causal,
                window_size_left=left, window_size_right=right, softcap=cap,
            )  # fmt: skip
        return y, lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, call: FlashAttentionCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v by flash-attn 2."""
        starts, (queries, keys), (left, right) = call.cu_seqlens, call.longest, call.window_size
        cap = call.softcap or 0.0
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        same_bits = torch.are_deterministic_algorithms_enabled()
        if starts is None:
            self.library._flash_attn_backward(
                dy, q, k, v, y, lse, dq, dk, dv, dropout_p=0.0, softmax_scale=call.scale, causal=call.is_causal,
                window_size_left=left, window_size_right=right, softcap=cap, alibi_slopes=None, deterministic=same_bits,
            )  # fmt: skip
        else:
            self.library._flash_attn_varlen_backward(
                dy, q, k, v, y, lse, dq, dk, dv, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=queries,
                max_seqlen_k=keys, dropout_p=0.0, softmax_scale=call.scale, causal=call.is_causal,
                window_size_left=left, window_size_right=right, softcap=cap, alibi_slopes=None, deterministic=same_bits,
            )  # fmt: skip
        return dq, dk, dv


class FlashAttention3:
    """Flash attention kernel of the flash-attn 3 package, for Hopper GPUs.
    It calls the package's operators, whose arguments are stable, not their Python wrappers.
    """

    def __init__(self) -> None:
        import flash_attn_interface  # noqa: F401  registers the operators

        self.library = torch.ops.flash_attn_3

    def supports_call(self, q: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform) -> bool:
        """Return whether operands are on a GPU, in bf16 or fp16, with a head size that flash-attn 3 supports."""
        return supports_fused_attention_on_gpu(q, v)

    def supports_uneven_heads(self, d: int, e: int) -> bool:
        """Return True for keys of 129 to 192 and values of 97 to 128 elements, such as DeepSeek's MLA has."""
        return 128 < d <= 192 and 96 < e <= 128

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashAttentionCall) -> tuple[Tensor, Tensor]:
        """Return the attention output and the log-sum-exp of the scores, by flash-attn 3."""
        starts, (queries, keys), (left, right) = call.cu_seqlens, call.longest, call.window_size
        y, lse, *_ = self.library.fwd(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts,
            max_seqlen_q=None if starts is None else queries, max_seqlen_k=None if starts is None else keys,
            softmax_scale=call.scale, is_causal=call.is_causal, window_size_left=left, window_size_right=right,
            softcap=call.softcap or 0.0, num_splits=1,
        )  # fmt: skip
        return y, lse

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, call: FlashAttentionCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v by flash-attn 3."""
        starts, (queries, keys), (left, right) = call.cu_seqlens, call.longest, call.window_size
        dq, dk, dv = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        self.library.bwd(
            dy, q, k, v, y, lse, dq, dk, dv, cu_seqlens_q=starts, cu_seqlens_k=starts,
            max_seqlen_q=None if starts is None else queries, max_seqlen_k=None if starts is None else keys,
            softmax_scale=call.scale, is_causal=call.is_causal, window_size_left=left, window_size_right=right,
            softcap=call.softcap or 0.0, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv
