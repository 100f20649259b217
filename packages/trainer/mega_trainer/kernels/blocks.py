"""Attention of some queries to some keys, product by product, and its backward: what context parallelism is made of.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, G = H/K queries that share one, d size of queries
and keys, e of values. Queries that share a key are rows of one product: [B, K, G S, d], so no key is repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mega_trainer.kernels.base import Scores, Seen


def attend_block(q: Tensor, k: Tensor, v: Tensor, seen: Seen, how: Scores) -> tuple[Tensor, Tensor]:
    """See `Kernels.attend_block`."""
    keys = k.shape[2]
    scores, _ = _scores(q, k, seen, how)
    lse = scores.logsumexp(-1)
    p = (scores - _finite(lse).unsqueeze(-1)).exp_()
    y = _as_rows(p, keys).to(v.dtype) @ v.transpose(1, 2)
    return _from_rows(y, q.shape[2]).to(lse.dtype), lse.transpose(1, 2)


def attend_block_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, seen: Seen, how: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Kernels.attend_block_backward`."""
    heads, keys = q.shape[2], k.shape[2]
    scores, slope = _scores(q, k, seen, how)
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


def _scores(q: Tensor, k: Tensor, seen: Seen, how: Scores) -> tuple[Tensor, Tensor | None]:
    """Scores [B, H, S, T] in at least fp32, minus infinity where unseen, and the soft cap's derivative, if there is one."""
    product = (_rows(q, k.shape[2]) @ k.permute(0, 2, 3, 1)) * how.scale
    scores = product.view(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    scores = scores.to(torch.promote_types(q.dtype, torch.float32))
    slope = None
    if how.softcap is not None:
        bent = torch.tanh(scores / how.softcap)
        scores, slope = how.softcap * bent, 1 - bent.square()
    if isinstance(seen, Tensor):
        scores = scores.masked_fill(~seen, float("-inf"))
    elif seen == "causal":
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores, slope


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == float("-inf"), 0.0)


def _rows(x: Tensor, keys: int) -> Tensor:
    """[B, S, H, d] -> [B, K, G S, d]."""
    return _as_rows(x.transpose(1, 2), keys)


def _as_rows(x: Tensor, keys: int) -> Tensor:
    """[B, H, S, d] -> [B, K, G S, d]."""
    return x.reshape(x.shape[0], keys, -1, x.shape[-1])


def _from_rows(x: Tensor, heads: int) -> Tensor:
    """[B, K, G S, d] -> [B, S, H, d]."""
    return x.reshape(x.shape[0], heads, -1, x.shape[-1]).transpose(1, 2)
