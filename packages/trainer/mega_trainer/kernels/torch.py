"""The reference back end: plain torch, on any device and in any precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.kernels import blocks, fused, grouped, products
from mega_trainer.kernels.base import Rotation, Scores
from mega_trainer.kernels.flash import Flash, TorchFlash
from mega_trainer.kernels.fused import wide
from mega_trainer.kernels.grouped import Rows
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.kernels.masks import CAUSAL, Mask, dense


class TorchKernels:
    """`Kernels` in terms of torch's own operations.

    Args:
        leaves: computes what is no product and no attention.
        flash: attention's kernel, used wherever it can be. By default it is torch's, and plain causal attention, without
            blocks or documents, is left to torch's own choice.
    """

    def __init__(self, leaves: Leaves | None = None, flash: Flash | None = None) -> None:
        self.leaves, self.flash, self.torch_chooses = leaves or Leaves(), flash or TorchFlash(), flash is None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `Kernels.linear`."""
        return F.linear(x, weight, bias)

    def linear_dx(self, dy: Tensor, weight: Tensor) -> Tensor:
        """See `Kernels.linear_dx`."""
        return dy.matmul(weight)

    def linear_dw(self, dy: Tensor, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """See `Kernels.linear_dw`."""
        return products.product(dy.flatten(0, -2).t(), x.flatten(0, -2), out, add=add)

    def grouped_linear(self, x: Tensor, weight: Tensor, rows: Rows) -> Tensor:
        """See `Kernels.grouped_linear`."""
        return grouped.product(x, weight.mT, rows)

    def grouped_dx(self, dy: Tensor, weight: Tensor, rows: Rows) -> Tensor:
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
        if not isinstance(mask, Tensor) and (mask != CAUSAL or how.bent or not self.torch_chooses):
            return blocks.attention(self.flash, q, k, v, mask, how)
        if how.bent:
            return plain_attention(q, k, v, mask, how)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped, given = q.shape[1] != k.shape[1], mask if isinstance(mask, Tensor) else None
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=given, is_causal=given is None, scale=how.scale, enable_gqa=grouped
        )
        return y.transpose(1, 2)

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

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """See `Kernels.rotate`."""
        return fused.rotate(x, rotation, [x.shape[-2]], 1, self.leaves)[0]

    def rotate_qkv(self, qkv: Tensor, rotation: Rotation, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernels.rotate_qkv`."""
        q, k, v = fused.rotate(qkv, rotation, [heads, kv_heads, kv_heads], 2, self.leaves)
        return q, k, v


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
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if how.sinks is not None:
        sinks = how.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        p = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        p = scores.softmax(-1)
    return (drop(p) @ v).transpose(1, 2)
