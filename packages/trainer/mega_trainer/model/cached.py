"""What generation keeps between forwards, and a layer's attention to it.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, d size of queries and keys, e of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mega_trainer.kernels.base import Kernels, Scores
from mega_trainer.kernels.masks import ALL, Mask
from mega_trainer.model.relative import Relative

# Queries [B, S, H, d], keys [B, T, K, d], values [B, T, K, e] and the mask to [B, S, H, e], by a layer's rule.
Attend = Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
# The next tokens of some sequences [R, S, c], and what earlier ones left, tensors [R, ..], or None: to [R, S, e] and the same.
Recur = Callable[[Tensor, Sequence[Tensor] | None], tuple[Tensor, Sequence[Tensor]]]


@dataclass(frozen=True)
class CachedAttention:
    """A layer's rule: what becomes of its scores, and what relative positions add to them."""

    kernels: Kernels
    how: Scores
    relative: Relative | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """See `Attend`."""
        how = self.how if self.relative is None else self.relative.of_scores(self.how, q.shape[1], k.shape[1])
        return self.kernels.attention(q, k, v, mask, how)

    def rows(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """See `Kernels.attention_of_rows`."""
        if self.relative is None and not self.how.bent:
            return self.kernels.attention_of_rows(q, keys, values, self.how.scale)
        ones = zip(q[:, None, None], keys, values, strict=True)
        alone = [self(one, k.transpose(1, 2), v.transpose(1, 2), ALL) for one, k, v in ones]
        return torch.cat(alone).squeeze(1)


class Cache(Protocol):
    """Keeps the keys and values of earlier tokens for generation, or the latents of both, or what tokens leave of a state."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, window: int | None, attend: CachedAttention
    ) -> Tensor:
        """Keep this call's k and v, and let its queries see them and what was kept before, `window` keys at most.

        q [B, S, H, d], k [B, S, K, d] and v [B, S, K, e] -> [B, S, H, e]; without v the keys are the values, too.
        """

    def cross(self, layer: int, q: Tensor, attend: Attend) -> Tensor:
        """Let this call's queries [B, S, H, d] see what the encoder made of their texts: [B, S, H, d]."""

    def recur(self, layer: int, x: Tensor, step: Recur) -> Tensor:
        """Let this call's tokens x [B, S, c] go on from the states before them, and keep those behind: [B, S, e]."""
