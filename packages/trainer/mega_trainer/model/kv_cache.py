"""KV cache interface of generation, and a layer's attention to cached keys and values.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, d size of queries and keys, e of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mega_trainer.kernels.attention_masks import ALL, AttentionMaskSpec
from mega_trainer.kernels.kernel_interface import Kernels, ScoreTransform
from mega_trainer.model.relative_position_bias import PositionBias

# A layer's attention: (queries [B, S, H, d], keys [B, T, K, d], values [B, T, K, e], mask) -> [B, S, H, e].
AttendFunction = Callable[[Tensor, Tensor, Tensor, AttentionMaskSpec], Tensor]
# A layer's recurrence: (next tokens of some sequences [R, S, c], their states [R, ..] or None) -> ([R, S, e], new states).
RecurrenceFunction = Callable[[Tensor, Sequence[Tensor] | None], tuple[Tensor, Sequence[Tensor]]]


@dataclass(frozen=True)
class CachedAttention:
    """Attention function that a layer passes to the KV cache, with the layer's score transform and relative position
    bias.
    """

    kernels: Kernels
    how: ScoreTransform
    relative: PositionBias | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec) -> Tensor:
        """Compute the layer's attention of q to cached k and v; see `Kernels.attention`."""
        how = self.how if self.relative is None else self.relative.add_to_scores(self.how, q.shape[1], k.shape[1])
        return self.kernels.attention(q, k, v, mask, how)

    def decode_attention(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Compute the layer's attention with one query per batch row; see `Kernels.decode_attention`."""
        if self.relative is None and not self.how.has_unfused_terms:
            return self.kernels.decode_attention(q, keys, values, self.how.scale)
        rows = zip(q[:, None, None], keys, values, strict=True)
        return torch.cat([self(row, k.transpose(1, 2), v.transpose(1, 2), ALL) for row, k, v in rows]).squeeze(1)


class KVCache(Protocol):
    """Interface of a cache of earlier tokens for generation: keys and values, MLA latents, or recurrent states of each
    layer.
    """

    def update_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, window: int | None, attend: CachedAttention
    ) -> Tensor:
        """Append this call's k and v to the cache and attend from q to all cached keys; a query attends to at most the
        last `window` keys.

        q [B, S, H, d], k [B, S, K, d] and v [B, S, K, e] -> [B, S, H, e]; without v the keys are also the values.
        """

    def cross_attend(self, layer: int, q: Tensor, attend: AttendFunction) -> Tensor:
        """Attend from this call's queries [B, S, H, d] to the cached encoder keys and values: [B, S, H, d]."""

    def update_and_recur(self, layer: int, x: Tensor, step: RecurrenceFunction) -> Tensor:
        """Call `step` with this call's tokens x [B, S, c] and the layer's cached recurrent states, store the new
        states, and return the outputs [B, S, e].
        """
