"""The reference back end: plain torch, on any device and in any precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.kernels import blocks, conv, fused, grouped, products
from mega_trainer.kernels.base import Factor, Rotation, Scores, WholeAttention
from mega_trainer.kernels.chunks import Chunks
from mega_trainer.kernels.delta_rule import Updates, delta_rule
from mega_trainer.kernels.flash import Flash, TorchFlash
from mega_trainer.kernels.fused import wide
from mega_trainer.kernels.grouped import Rows
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.kernels.masks import ALL, CAUSAL, Band, Mask, dense
from mega_trainer.kernels.recurrent import RecurrentLibraries
from mega_trainer.kernels.scan import Steps, scan

FEW_QUERIES = 16  # whose mask is small beside their keys


class TorchKernels:
    """`Kernels` in terms of torch's own operations.

    Args:
        leaves: computes what is no product and no attention.
        flash: attention's kernel; by default torch's.
        whole: goes before it where it can, for whole sequences; by default torch's choice, but with a `flash` nothing.
        recurrent: libraries for recurrent mixers.
    """

    def __init__(
        self,
        leaves: Leaves | None = None,
        flash: Flash | None = None,
        whole: WholeAttention | None = None,
        recurrent: RecurrentLibraries | None = None,
    ) -> None:
        self.recurrent = recurrent or RecurrentLibraries()
        self.leaves, self.flash = leaves or Leaves(), flash or TorchFlash()
        self.whole = whole or (Sdpa() if flash is None else None)

    def prepare_weight(self, weight: Tensor) -> Factor:
        """See `Kernels.prepare_weight`."""
        return weight

    def prepare_grouped_weight(self, weight: Tensor) -> Factor:
        """See `Kernels.prepare_grouped_weight`."""
        return weight

    def prepare_gradient(self, dy: Tensor) -> Factor:
        """See `Kernels.prepare_gradient`."""
        return dy

    def linear(self, x: Tensor, weight: Factor, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""
        return F.linear(x, weight, bias)

    def linear_dx(self, dy: Factor, weight: Factor) -> Tensor:
        """See `Kernels.linear_dx`."""
        dx: Tensor = dy.matmul(weight)
        return dx

    def linear_dw(self, dy: Factor, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """See `Kernels.linear_dw`."""
        return products.product(dy.flatten(0, -2).t(), x.flatten(0, -2), out, add=add)

    def grouped_linear(self, x: Tensor, weight: Factor, rows: Rows) -> Tensor:
        """See `Kernels.grouped_linear`."""
        return grouped.product(x, weight.mT, rows)

    def grouped_dx(self, dy: Tensor, weight: Factor, rows: Rows) -> Tensor:
        """See `Kernels.grouped_dx`."""
        return grouped.product(dy, weight, rows)

    def grouped_dw(self, dy: Tensor, x: Tensor, rows: Rows, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """See `Kernels.grouped_dw`."""
        return grouped.outer(dy, x, rows, out, add=add)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
        """See `Kernels.rms_norm`."""
        return self.add_rms_norm(x, None, weight, eps, zero_centered=zero_centered)[1]

    def add_rms_norm(
        self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, *, zero_centered: bool = False
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.add_rms_norm`."""
        return fused.add_rms_norm(x, y, weight, eps, zero_centered, self.leaves)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, zero_centered: bool = False
    ) -> Tensor:
        """See `Kernels.layer_norm`."""
        if zero_centered:
            offset = None if bias is None else wide(bias)
            return F.layer_norm(wide(x), (x.shape[-1],), 1 + wide(weight), offset, eps).to(x.dtype)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Mask, how: Scores) -> Tensor:
        """See `Kernels.attention`."""
        if isinstance(mask, Tensor):
            return plain_attention(q, k, v, mask, how) if how.bent else _sdpa(q, k, v, mask, how.scale)
        if self.whole is not None and self.whole.takes(q, k, v, mask, how):
            return self.whole(q, k, v, mask, how)
        return blocks.attention(self.flash, q, k, v, mask, how)

    def attention_of_rows(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> Tensor:
        """See `Kernels.attention_of_rows`. Heads that share a key stand as queries of it, so that it is read once."""
        rows = q.view(len(q), keys[0].shape[1], -1, q.shape[-1])
        attend = partial(F.scaled_dot_product_attention, scale=scale)
        if len(keys) == 1:
            return attend(rows, keys[0], values[0]).flatten(1, 2)
        return torch.cat(list(map(attend, torch.split(rows, 1), keys, values))).flatten(1, 2)

    def attend_block(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, how: Scores) -> tuple[Tensor, Tensor]:
        """See `Kernels.attend_block`."""
        return blocks.attend_block(self.flash, q, k, v, mask, how)

    def attend_block_backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, mask: Mask, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernels.attend_block_backward`."""
        return blocks.attend_block_backward(self.flash, dy, q, k, v, y, lse, mask, how)

    def gated(
        self, gate_up: Tensor, activation: str, limit: float | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """See `Kernels.gated`."""
        return fused.gated(gate_up, weights, activation, limit, self.leaves)

    def short_conv(
        self, x: Tensor, before: Tensor | None, weight: Tensor, bias: Tensor | None, reach: Tensor | None
    ) -> Tensor:
        """See `Kernels.short_conv`."""
        if self.recurrent.conv is not None:
            return self.recurrent.conv(x, before, weight, bias, reach)
        return conv.short_conv(x, before, weight, bias, reach, self.leaves)

    def scan(self, steps: Steps, chunks: Chunks, states: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """See `Kernels.scan`."""
        if chunks.whole and self.recurrent.scan is not None:
            return self.recurrent.scan(steps, chunks)
        return scan(steps, chunks, states)

    def delta_rule(self, updates: Updates, chunks: Chunks, states: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """See `Kernels.delta_rule`."""
        if chunks.whole and self.recurrent.delta is not None:
            return self.recurrent.delta(updates, chunks)
        return delta_rule(updates, chunks, states)

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """See `Kernels.rotate`."""
        return fused.rotate(x, rotation, [x.shape[-2]], 1, self.leaves)[0]

    def rotate_qkv(self, qkv: Tensor, rotation: Rotation, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernels.rotate_qkv`."""
        q, k, v = fused.rotate(qkv, rotation, [heads, kv_heads, kv_heads], 2, self.leaves)
        return q, k, v


class Sdpa:
    """Plain attention of whole sequences, causal or to all keys, by whatever kernel torch thinks best; and of a few queries to
    the keys of a cache, as a CPU's generation has them.
    """

    def takes(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, how: Scores) -> bool:
        """See `WholeAttention.takes`."""
        few = q.shape[1] <= FEW_QUERIES and not torch.is_grad_enabled() and q.device.type == "cpu"
        return not how.bent and (_is_whole(q, k, mask) or (few and isinstance(mask, Band)))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, how: Scores) -> Tensor:
        """See `WholeAttention.__call__`."""
        if _is_whole(q, k, mask):
            return _sdpa(q, k, v, None, how.scale, causal=mask == CAUSAL)
        assert isinstance(mask, Band)
        return _of_few(q, k, v, mask, how.scale)


def _is_whole(q: Tensor, k: Tensor, mask: Mask) -> bool:
    """Whether torch has a name for it."""
    return mask == ALL or (mask == CAUSAL and q.shape[1] == k.shape[1])


def _of_few(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> Tensor:
    """As `_sdpa`. Heads that share a key stand as queries of it, so that it is read once."""
    batch, queries, heads, size = q.shape
    keys, kv_heads = k.shape[1:3]
    rows = q.view(batch, queries, kv_heads, -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
    unseen = _unseen(band, queries, keys, heads // kv_heads, q.dtype)
    y = F.scaled_dot_product_attention(rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=unseen, scale=scale)
    return y.view(batch, kv_heads, -1, queries, y.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)


@lru_cache(8)
def _unseen(band: Band, queries: int, keys: int, times: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores, minus infinity where a key is not seen: [1, 1, times * queries, keys]. Layers ask for the same."""
    seen = dense(band, (1, queries), keys, torch.device("cpu")).repeat(1, 1, times, 1)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool = False) -> Tensor:
    """[B, S, H, d], [B, T, K, d] and [B, T, K, e] -> [B, S, H, e]."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | Mask,
    how: Scores,
    drop: Callable[[Tensor], Tensor] = lambda probabilities: probabilities,
) -> Tensor:
    """`Kernels.attention` product by product, for what the fused ones lack; `drop` sees the probabilities [B, H, S, T]."""
    heads, keys = q.shape[2], k.shape[2]
    if not isinstance(mask, Tensor):
        mask = dense(mask, q.shape, k.shape[1], q.device)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(heads // keys, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * how.scale
    if how.bias is not None:
        scores = scores + how.bias.dense(scores.shape[-2], scores.shape[-1])
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if how.sinks is not None:
        sinks = how.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        p = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        p = scores.softmax(-1)
    return (drop(p) @ v).transpose(1, 2)
