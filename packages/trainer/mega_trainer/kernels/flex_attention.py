"""FlexAttention (arXiv:2412.05496): a kernel that torch's compiler generates for scores that others do not support,
such as soft caps.

Legend: B batch, S queries, T keys, N = B S tokens of documents one after another, H query heads, K key/value heads, d size of
queries and keys, e of values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from mega_trainer.kernels.attention_masks import AttentionMaskSpec, BandMask
from mega_trainer.kernels.flash_attention import FlashCall
from mega_trainer.kernels.kernel_interface import ScoreTransform


class FlexAttentionKernel:
    """`FlashKernel` by FlexAttention. The backward of a block recomputes its output, as autograd requires.

    Args:
        compiled: as one kernel; else it is computed product by product, for tests.
    """

    def __init__(self, *, compiled: bool = True) -> None:
        made: Callable[[Any], Any] = torch.compile if compiled else lambda function: function
        self.attend, self.on_gpu = made(flex_attention), compiled
        make = made(create_block_mask)
        self.mask = lru_cache(8)(lambda *what: make(_make_mask_mod(*what), None, None, *what[:2], device=what[4]))

    def supports_call(self, q: Tensor, v: Tensor, mask: AttentionMaskSpec, how: ScoreTransform) -> bool:
        """Return whether the operands are on the device compiled for; see `FlashKernel.supports_call`."""
        return q.is_cuda == self.on_gpu

    def supports_uneven_heads(self, d: int, e: int) -> bool:
        """Return True; see `FlashKernel.supports_uneven_heads`."""
        return True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        """Attend; see `FlashKernel.forward`."""
        if call.cu_seqlens is not None:
            y, lse = self._attend(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), call)
            return y[0], lse[0]
        return self._attend(q, k, v, call)

    def backward(
        self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, call: FlashCall
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients; see `FlashKernel.backward`.

        With the share w = exp(lse of these keys - lse) of the probability, dY w is the gradient of their own y, and that of
        their log-sum-exp is w (sum of y of these keys times dy - sum of y times dy).
        """
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        with torch.enable_grad():
            own, own_lse = self.forward(q, k, v, call)
        with torch.no_grad():
            wide = dy.to(lse.dtype)
            share = (own_lse - lse).exp()
            d_lse = share * ((own.to(lse.dtype) - y) * wide).sum(-1).transpose(-2, -1)
            d_own = (wide * share.transpose(-2, -1).unsqueeze(-1)).to(own.dtype)
        dq, dk, dv = torch.autograd.grad((own, own_lse), (q, k, v), (d_own, d_lse))
        return dq, dk, dv

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
        """Attend: [B, S, H, d], [B, T, K, d] and [B, T, K, e] -> [B, S, H, e] and [B, H, S]."""
        mask: BlockMask = self.mask(q.shape[1], k.shape[1], call.band, call.cu_seqlens, q.device)
        cap = call.softcap

        def score_softcap(score: Tensor, *_: Tensor) -> Tensor:
            return score if cap is None else cap * torch.tanh(score / cap)

        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y, aux = self.attend(
            q, k, v, score_mod=score_softcap, block_mask=mask, scale=call.scale,
            enable_gqa=q.shape[1] != k.shape[1], return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        return y.transpose(1, 2), aux.lse


def _make_mask_mod(
    queries: int, keys: int, band: BandMask, cu_seqlens: Tensor | None, device: torch.device
) -> Callable[..., Tensor]:
    """Return FlexAttention's mask_mod: whether a query position attends to a key position."""
    ahead = keys - queries
    document = None
    if cu_seqlens is not None:
        document = torch.bucketize(torch.arange(keys, device=device), cu_seqlens[1:], right=True)

    def band_mask_mod(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + ahead - key
        seen = distance >= (-band.right if band.right is not None else -(queries + keys))
        if band.left is not None:
            seen = seen & (distance <= band.left)
        if document is not None:
            seen = seen & (document[query] == document[key])
        return seen

    return band_mask_mod
