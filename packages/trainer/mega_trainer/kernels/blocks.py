"""Attention of some queries to some keys, and its backward: what context parallelism is made of.

A block is one fused kernel each way (arXiv:2205.14135) where there is one for it: torch's flash attention, whose twin for
CPUs takes every precision. Its backward is told y and the logarithm of the sum over all blocks, and so gives the part of the
gradient that comes from its own. Masks, soft caps and what a GPU's kernel does not take go product by product.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, G = H/K queries that share one, d size of queries
and keys, e of values. Queries that share a key are rows of one product: [B, K, G S, d], so no key is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.kernels.base import Scores, Seen

# Elements of the scores at hand: on a CPU they should stay in its cache, on a GPU fill it with work.
TILE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}
WIDEST_HEAD = 256  # of the flash kernels on GPUs
_aten = torch.ops.aten


def attend_block(q: Tensor, k: Tensor, v: Tensor, seen: Seen, how: Scores) -> tuple[Tensor, Tensor]:
    """See `Kernels.attend_block`."""
    if _fused(q, v, seen, how):
        return _flash(q, k, v, seen == "causal", how.scale)
    parts = [_attend(q[:, rows], k[:, keys], v[:, keys], mask, how) for rows, keys, mask in _tiles(q, k.shape[1], seen)]
    return torch.cat([y for y, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def attend_block_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, seen: Seen, how: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Kernels.attend_block_backward`."""
    if _fused(q, v, seen, how):
        return _flash_backward(dy, q, k, v, y, lse, seen == "causal", how.scale)
    dk, dv = torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
    delta, dq = (y.to(lse.dtype) * dy).sum(-1), []
    for rows, keys, mask in _tiles(q, k.shape[1], seen):
        queries = dy[:, rows], q[:, rows], lse[:, rows], delta[:, rows]
        dq_part, dk_part, dv_part = _attend_backward(*queries, k[:, keys], v[:, keys], mask, how)
        dq.append(dq_part)
        dk[:, keys] += dk_part
        dv[:, keys] += dv_part
    return torch.cat(dq, 1), dk, dv


def _fused(q: Tensor, v: Tensor, seen: Seen, how: Scores) -> bool:
    """Whether torch has one kernel for such a block."""
    if isinstance(seen, Tensor) or how.softcap is not None:
        return False
    width = max(q.shape[-1], v.shape[-1])
    return not q.is_cuda or (q.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= WIDEST_HEAD)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    width, value = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (_widened(t, width).transpose(1, 2) for t in (q, k, v))
    kernel = (
        _aten._scaled_dot_product_flash_attention if q.is_cuda else _aten._scaled_dot_product_flash_attention_for_cpu
    )
    y, lse, *_ = kernel(q, k, v, 0.0, causal, scale=scale)
    return y.transpose(1, 2)[..., :value], lse.transpose(1, 2)


def _flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    width, sizes = max(q.shape[-1], v.shape[-1]), (q.shape[-1], k.shape[-1], v.shape[-1])
    dy, q, k, v, y = (_widened(t, width).transpose(1, 2) for t in (dy, q, k, v, y))
    lse = lse.transpose(1, 2).contiguous()
    if q.is_cuda:
        # no sequences of uneven lengths, and no dropout, whose generator's state it would want to know
        unused = torch.empty(0, dtype=torch.int64, device=q.device)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            dy, q, k, v, y, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused, scale=scale
        )
    else:
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, y, lse, 0.0, causal, scale=scale
        )
    dq, dk, dv = (grad.transpose(1, 2)[..., :size] for grad, size in zip(grads, sizes, strict=True))
    return dq, dk, dv


def _widened(x: Tensor, width: int) -> Tensor:
    """Heads filled up with zeros, which add nothing to a score or a value, to the one width that the kernel takes."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _tiles(q: Tensor, keys: int, seen: Seen) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Some queries at a time, with the keys that they may see and the mask of both; None where all is seen."""
    rows, queries, heads = q.shape[:3]
    step = max(1, TILE_ELEMENTS.get(q.device.type, 1 << 26) // (rows * heads * keys))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        if isinstance(seen, Tensor):
            yield slice(start, stop), slice(None), seen[..., start:stop, :]
        elif seen == "causal":
            mask = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).tril_(start)
            yield slice(start, stop), slice(0, stop), mask
        else:
            yield slice(start, stop), slice(None), None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Scores) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(q, k, mask, how)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp_()
    y = _as_rows(p, k.shape[2]).to(v.dtype) @ v.transpose(1, 2)
    return _from_rows(y, q.shape[2]).to(lse.dtype), lse.transpose(1, 2)


def _attend_backward(
    dy: Tensor, q: Tensor, lse: Tensor, delta: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    heads, keys = q.shape[2], k.shape[2]
    scores, slope = _scores(q, k, mask, how)
    p = (scores - lse.transpose(1, 2).unsqueeze(-1)).exp_()
    rows, wide = _rows(dy, keys), p.dtype
    dv = _as_rows(p, keys).to(dy.dtype).transpose(-1, -2) @ rows
    dp = (rows @ v.permute(0, 2, 3, 1)).to(wide).view_as(p)
    d_scores = p * (dp - delta.transpose(1, 2).unsqueeze(-1)) * how.scale
    if slope is not None:
        d_scores *= slope
    ds = _as_rows(d_scores, keys).to(q.dtype)
    dq, dk = ds @ k.transpose(1, 2), ds.transpose(-1, -2) @ _rows(q, keys)
    return _from_rows(dq, heads).to(wide), dk.transpose(1, 2).to(wide), dv.transpose(1, 2).to(wide)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, how: Scores) -> tuple[Tensor, Tensor | None]:
    """Scores [B, H, S, T] in at least fp32, minus infinity where unseen, and the soft cap's derivative, if there is one."""
    product = (_rows(q, k.shape[2]) @ k.permute(0, 2, 3, 1)) * how.scale
    scores = product.view(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    slope = None
    if how.softcap is not None:
        bent = torch.tanh(scores / how.softcap)
        scores, slope = how.softcap * bent, 1 - bent.square()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores, slope


def _rows(x: Tensor, keys: int) -> Tensor:
    """[B, S, H, d] -> [B, K, G S, d]."""
    return _as_rows(x.transpose(1, 2), keys)


def _as_rows(x: Tensor, keys: int) -> Tensor:
    """[B, H, S, d] -> [B, K, G S, d]."""
    return x.reshape(x.shape[0], keys, -1, x.shape[-1])


def _from_rows(x: Tensor, heads: int) -> Tensor:
    """[B, K, G S, d] -> [B, S, H, d]."""
    return x.reshape(x.shape[0], heads, -1, x.shape[-1]).transpose(1, 2)
