"""Attention proper, between the projections: one rank's heads of queries, keys and values to their outputs.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, d size of queries and keys, e of values.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn

from mega_trainer.kernels.base import Scores
from mega_trainer.kernels.torch import plain_attention
from mega_trainer.model.builder import Builder
from mega_trainer.model.cached import Cache, CachedAttention
from mega_trainer.model.context import Context, Sequences
from mega_trainer.model.relative import Relative
from mega_trainer.parallel.context import InParts, context_parallel


class AttentionCore(nn.Module):
    """What one layer's heads do with their scores.

    Args:
        build: of the model.
        layer: number of the layer.
        scale: factor on the scores; 1 / sqrt(d) by default.
        sinks: this rank's [H], if the model has them.
    """

    def __init__(
        self, build: Builder, layer: int, *, scale: float | None = None, sinks: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        config, tp = build.config, build.groups.tp
        self.layer, self.saved, self.kernels = layer, build.saved, build.kernels
        self.window, self.dropout = config.window(layer), config.attention_dropout
        self.scale, self.softcap = scale or 1 / math.sqrt(config.head_size), config.attention_softcap
        self.sinks = sinks
        self.first_head = tp.rank * config.num_attention_heads // tp.size
        self.ranks, self.spread = build.groups.cp.size, context_parallel(build.cp_kind, build.groups.cp, build.kernels)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q [B, S, H, d], k [B, T, K, d], v [B, T, K, e] -> [B, S, H, e]."""
        if context.cache is not None:
            return self.cached(q, k, v, context.cache, context.relative)
        length, how, whole = q.shape[1] * self.ranks, self.how, partial(self._whole, context)
        if context.relative is not None:
            how = context.relative.of_scores(how, length, length)
        if self.spread is None:
            return whole(q, k, v, how, 0)
        assert isinstance(context.sight, Sequences)  # training's
        see = partial(context.sight.parts, window=self.window)
        return self.spread.attention(q, k, v, how, see, whole)

    @property
    def how(self) -> Scores:
        """What becomes of all scores."""
        return Scores(self.scale, self.softcap, self.sinks)

    def cached(self, q: Tensor, k: Tensor, v: Tensor | None, cache: Cache, relative: Relative | None = None) -> Tensor:
        """See `Cache.attend`."""
        return cache.attend(self.layer, q, k, v, self.window, CachedAttention(self.kernels, self.how, relative))

    def _whole(self, context: Context, q: Tensor, k: Tensor, v: Tensor, how: Scores, first: int) -> Tensor:
        """Attention of whole sequences by this rank's heads from its `first` on: block by block no scores are kept."""
        return self.saved.whole("attention", self._attend, context, q, k, v, how, first)

    def _attend(self, context: Context, q: Tensor, k: Tensor, v: Tensor, how: Scores, first: int) -> Tensor:
        if isinstance(context.sight, Sequences) and context.sight.blocks:
            return InParts.by(self.kernels).attention(q, k, v, how, partial(context.sight.parts, window=self.window))
        mask = context.sight.mask(self.window)
        if context.dropout is not None and self.dropout:
            # the fused kernels draw their own masks, which would depend on the layout
            first_head = self.first_head + first
            drop = partial(context.dropout.scores, p=self.dropout, layer=self.layer, first_head=first_head)
            return plain_attention(q, k, v, mask, how, drop)
        return self.kernels.attention(q, k, v, mask, how)
