"""Blockwise attention of some queries to some keys, and its backward, for whole sequences and for context parallelism.

A block is one kernel of `FlashKernel` each way if it supports the call. The backward of a block gets y and the log-sum-exp
over all blocks, and returns the part of the gradient that comes from its own keys. Other calls are computed GEMM by GEMM in
tiles of queries with the keys that they attend to, so that no memory grows with S T.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, G = H/K queries that share one, d size of queries
and keys, e of values. Queries that share a key are rows of one GEMM: [B, K, G S, d], so no key is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mega_trainer.kernels.attention_masks import AttentionMaskSpec, BandMask, PackedDocumentMask
from mega_trainer.kernels.flash_attention import FlashAttentionCall, FlashKernel
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform
from mega_trainer.kernels.leaf_compiler import apply_autograd_function

# Score elements per tile: on a CPU they should fit its cache, on a GPU be enough to fill it.
TILE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}


def blockwise_attention(
    flash: FlashKernel, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform
) -> Tensor:
    """Compute differentiable attention over all keys as one block, by `flash` if it supports the call, else in tiles.
    Arguments and result are as in `Kernels.attention`.
    """
    values = None if how.bias is None else how.bias.values
    y: Tensor = apply_autograd_function(_Attention, q, k, v, how.sinks, values, mask, how, flash)
    return y


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        mask: AttentionMaskSpec,
        how: AttentionScoreTransform,
        flash: FlashKernel,
    ) -> Tensor:
        y, lse = attend_block(flash, q, k, v, mask, how)
        if sinks is not None:
            y, lse = apply_attention_sinks(y, lse, sinks)
        y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, lse, sinks, bias)
        ctx.mask, ctx.how, ctx.flash = mask, how, flash
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse, sinks, bias = ctx.saved_tensors
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=lse.dtype)
        grads = attend_block_backward(ctx.flash, dy, q, k, v, y, lse, ctx.mask, ctx.how, d_bias)
        dq, dk, dv = (grad.to(t.dtype) for grad, t in zip(grads, (q, k, v), strict=True))
        d_sinks = None if sinks is None else compute_attention_sinks_grad(sinks, dy, y, lse)
        return dq, dk, dv, d_sinks, None if d_bias is None else d_bias.to(bias.dtype), None, None, None


def apply_attention_sinks(y: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention output and log-sum-exp with attention sinks, from `y` and `lse` without; a sink has no value."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return y * (lse - total).exp_().unsqueeze(-1), total


def compute_attention_sinks_grad(sinks: Tensor, dy: Tensor, y: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the attention sinks [heads].
    A sink has the probability exp(sink - lse) in each query's softmax, and no value.
    """
    delta = (y.to(lse.dtype) * dy).sum(-1)
    return -((sinks.to(lse.dtype) - lse).exp() * delta).sum((0, 1)).to(sinks.dtype)


def attend_block(
    flash: FlashKernel, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform
) -> tuple[Tensor, Tensor]:
    """Return the attention to one block of keys and the log-sum-exp of its scores, by `flash` or in tiles.
    Not differentiable; arguments and results are as in `Kernels.attend_block`.
    """
    if how.bias is None and flash.supports_call(q, v, mask, how):
        return _attend_fused(flash, q, k, v, mask, how)
    if isinstance(mask, PackedDocumentMask):
        each = [attend_block(flash, q1, k1, v1, mask.band, how) for q1, k1, v1 in _split_documents(mask, q, k, v)]
        y, lse = (torch.cat(part, 1) for part in zip(*each, strict=True))
        return y.view(*q.shape[:2], *y.shape[2:]), lse.view(q.shape[:3])
    ahead = k.shape[1] - q.shape[1]
    found = [
        attend_unfused_with_mask(q[:, rows], k[:, keys], v[:, keys], seen, how, _bias_indices(how, rows, keys, ahead))
        for rows, keys, seen in _iterate_tiles(q, k, mask)
    ]
    return torch.cat([y for y, _ in found], 1), torch.cat([lse for _, lse in found], 1)


def attend_block_backward(
    flash: FlashKernel,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    mask: AttentionMaskSpec,
    how: AttentionScoreTransform,
    d_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v that come from one block of keys; add that of the bias to `d_bias`.
    See `Kernels.attend_block_backward`. `d_bias` is [H, n], in at least fp32.
    """
    if how.bias is None and flash.supports_call(q, v, mask, how):
        return _attend_fused_backward(flash, dy, q, k, v, y, lse, mask, how)
    if isinstance(mask, PackedDocumentMask):
        each = [
            attend_block_backward(flash, dy1, q1, k1, v1, y1, lse1, mask.band, how, d_bias)
            for dy1, q1, k1, v1, y1, lse1 in _split_documents(mask, dy, q, k, v, y, lse)
        ]
        dq, dk, dv = (torch.cat(part, 1) for part in zip(*each, strict=True))
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)
    dk, dv = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    delta, parts, ahead = (y.to(lse.dtype) * dy).sum(-1), [], k.shape[1] - q.shape[1]
    for rows, keys, seen in _iterate_tiles(q, k, mask):
        queries, met = (dy[:, rows], q[:, rows], lse[:, rows], delta[:, rows]), _bias_indices(how, rows, keys, ahead)
        dq_part, dk_part, dv_part = _attend_backward(*queries, k[:, keys], v[:, keys], seen, how, met, d_bias)
        parts.append(dq_part)
        dk[:, keys] += dk_part
        dv[:, keys] += dv_part
    return torch.cat(parts, 1), dk, dv


def _split_documents(mask: PackedDocumentMask, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors [B, S, ..] into documents, each a batch of one."""
    cut = [torch.split(t.flatten(0, 1), list(mask.lengths)) for t in tensors]
    return (tuple(part.unsqueeze(0) for part in parts) for parts in zip(*cut, strict=True))


# ------------------------------------------------------------------------------------------------------- fused kernels


def _attend_fused(
    flash: FlashKernel, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec, how: AttentionScoreTransform
) -> tuple[Tensor, Tensor]:
    (rows, queries), value = q.shape[:2], v.shape[-1]
    call = FlashAttentionCall.from_mask(mask, how, queries, k.shape[1])
    q, k, v = _pad_heads(flash, q, k, v)
    if call.cu_seqlens is not None:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    y, lse = flash.forward(q, k, v, call)
    return y.view(rows, queries, *y.shape[-2:])[..., :value], lse.transpose(-2, -1).reshape(rows, queries, -1)


def _attend_fused_backward(
    flash: FlashKernel,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    mask: AttentionMaskSpec,
    how: AttentionScoreTransform,
) -> tuple[Tensor, Tensor, Tensor]:
    operands, call = (q, k, v), FlashAttentionCall.from_mask(mask, how, q.shape[1], k.shape[1])
    q, k, v, y, dy = _pad_heads(flash, q, k, v, y, dy)
    if call.cu_seqlens is not None:
        dy, q, k, v, y, lse = (t.flatten(0, 1) for t in (dy, q, k, v, y, lse))
    grads = flash.backward(dy, q, k, v, y, lse.transpose(-2, -1).contiguous(), call)
    dq, dk, dv = (grad.view(*t.shape[:-1], -1)[..., : t.shape[-1]] for grad, t in zip(grads, operands, strict=True))
    return dq, dk, dv


def _pad_heads(flash: FlashKernel, q: Tensor, k: Tensor, *values: Tensor) -> list[Tensor]:
    """Pad heads with zeros, which change no score or value, where the kernel takes only one head size."""
    d, e = q.shape[-1], values[0].shape[-1]
    width = 0 if flash.supports_uneven_heads(d, e) else max(d, e)
    return [F.pad(t, (0, width - t.shape[-1])) if t.shape[-1] < width else t for t in (q, k, *values)]


# --------------------------------------------------------------------------------------------------------- GEMM by GEMM


def _iterate_tiles(q: Tensor, k: Tensor, band: BandMask) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield tiles of queries, the keys that they may attend to, and their mask; None if nothing is masked."""
    rows, queries, heads, keys = *q.shape[:3], k.shape[1]
    span = keys
    if band.left is not None and band.right is not None:
        span = min(keys, 2 * band.left + band.right + 2)
    step = max(1, TILE_ELEMENTS.get(q.device.type, 1 << 26) // (rows * heads * span))
    step = step if band.left is None or band.right is None else min(step, band.left + 1)
    for start in range(0, queries, step):
        some = range(start, min(start + step, queries))
        seen = band.visible_keys(some, queries, keys)
        yield (
            slice(some.start, some.stop),
            slice(seen.start, seen.stop),
            band.materialize_mask(some, seen, keys - queries, q.device),
        )


def _bias_indices(how: AttentionScoreTransform, rows: slice, keys: slice, ahead: int) -> Tensor | None:
    """Return `RelativePositionBias.compute_relative_bias_indices` of a tile, or None without a bias."""
    tile = range(rows.start, rows.stop), range(keys.start, keys.stop)
    return None if how.bias is None else how.bias.compute_relative_bias_indices(*tile, ahead)


def attend_unfused_with_mask(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: AttentionScoreTransform, met: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention GEMM by GEMM: y [B, S, H, e] and the log-sum-exp of the scores [B, S, H], without sinks.
    The `mask` is boolean, broadcastable to [B, H, S, T], or None; `met` [S, T] indexes the bias values, None: no bias.
    """
    scores, _ = _compute_scores(q, k, mask, how, met)
    lse = scores.logsumexp(-1)
    p = (scores - lse.unsqueeze(-1)).exp_()
    y = _as_rows(p, k.shape[2]).to(v.dtype) @ v.transpose(1, 2)
    return _from_rows(y, q.shape[2]).to(lse.dtype), lse.transpose(1, 2)


def _attend_backward(
    dy: Tensor,
    q: Tensor,
    lse: Tensor,
    delta: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    how: AttentionScoreTransform,
    met: Tensor | None,
    d_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, keys = q.shape[2], k.shape[2]
    scores, slope = _compute_scores(q, k, mask, how, met)
    p = (scores - lse.transpose(1, 2).unsqueeze(-1)).exp_()
    rows, wide = _group_heads(dy, keys), p.dtype
    dv = _as_rows(p, keys).to(dy.dtype).transpose(-1, -2) @ rows
    dp = (rows @ v.permute(0, 2, 3, 1)).to(wide).view_as(p)
    d_scores = p * (dp - delta.transpose(1, 2).unsqueeze(-1))
    if met is not None and d_bias is not None:
        d_bias.index_add_(1, met.flatten(), d_scores.sum(0).flatten(1))
    d_scores *= how.scale
    if slope is not None:
        d_scores *= slope
    ds = _as_rows(d_scores, keys).to(q.dtype)
    dq, dk = ds @ k.transpose(1, 2), ds.transpose(-1, -2) @ _group_heads(q, keys)
    return _from_rows(dq, heads).to(wide), dk.transpose(1, 2).to(wide), dv.transpose(1, 2).to(wide)


def _compute_scores(
    q: Tensor, k: Tensor, mask: Tensor | None, how: AttentionScoreTransform, met: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return scores [B, H, S, T] in at least fp32, minus infinity where masked, and the soft cap's derivative or None."""
    product = (_group_heads(q, k.shape[2]) @ k.permute(0, 2, 3, 1)) * how.scale
    scores = upcast_to_fp32(product.view(q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    slope = None
    if how.bias is not None and met is not None:
        scores = scores + how.bias.values[:, met]
    if how.softcap is not None:
        squashed = torch.tanh(scores / how.softcap)
        scores, slope = how.softcap * squashed, 1 - squashed.square()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores, slope


def _group_heads(x: Tensor, keys: int) -> Tensor:
    """Reshape [B, S, H, d] to [B, K, G S, d]."""
    return _as_rows(x.transpose(1, 2), keys)


def _as_rows(x: Tensor, keys: int) -> Tensor:
    """Reshape [B, H, S, d] to [B, K, G S, d]."""
    return x.reshape(x.shape[0], keys, -1, x.shape[-1])


def _from_rows(x: Tensor, heads: int) -> Tensor:
    """Reshape [B, K, G S, d] to [B, S, H, d]."""
    return x.reshape(x.shape[0], heads, -1, x.shape[-1]).transpose(1, 2)
