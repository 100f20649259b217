"""Attention proper, between the projections: one rank's heads of queries, keys and values to their outputs.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, d size of queries and keys, e of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mega_trainer.kernels.base import Scores
from mega_trainer.kernels.masks import ALL, Mask
from mega_trainer.kernels.torch import plain_attention
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Cache, Context, Sequences
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
        self,
        build: Builder,
        layer: int,
        *,
        scale: float | None = None,
        sinks: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        config, tp = build.config, build.groups.tp
        self.layer, self.saved, self.kernels = layer, build.saved, build.kernels
        self.window, self.dropout, self.softcap = (
            config.window(layer),
            config.attention_dropout,
            config.attention_softcap,
        )
        self.scale, self.sinks = scale or 1 / math.sqrt(config.head_size), sinks
        self.first_head = tp.rank * config.num_attention_heads // tp.size

        self.ranks = build.groups.cp.size
        self.spread = context_parallel(build.cp_kind, build.groups.cp, build.kernels)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q [B, S, H, d], k [B, T, K, d], v [B, T, K, e] -> [B, S, H, e]."""
        if context.cache is not None:
            return self.cached(q, k, v, context.cache, context.relative)
        length = q.shape[1] * self.ranks
        how = self.how(context.relative, length, length)
        whole = partial(self._whole, context)
        if self.spread is None:
            return whole(q, k, v, how, 0)
        assert isinstance(context.sight, Sequences)  # training's
        see = partial(context.sight.parts, window=self.window)
        return self.spread.attention(q, k, v, how, see, whole)

    def how(self, relative: Relative | None, queries: int, keys: int) -> Scores:
        """What becomes of the scores of so many queries and keys."""
        bias = None if relative is None else relative.of(queries, keys)
        return Scores(self.scale, self.softcap, self.sinks, bias)

    def cached(self, q: Tensor, k: Tensor, v: Tensor | None, cache: Cache, relative: Relative | None = None) -> Tensor:
        """See `Cache.attend`."""
        return cache.attend(self.layer, q, k, v, self.window, _Attend(self, relative))

    def _whole(self, context: Context, q: Tensor, k: Tensor, v: Tensor, how: Scores, first: int) -> Tensor:
        """Attention of whole sequences by this rank's heads from its `first` on: block by block no scores are kept."""
        return self.saved.whole("attention", self._attend, context, q, k, v, how, first)

    def _attend(self, context: Context, q: Tensor, k: Tensor, v: Tensor, how: Scores, first: int) -> Tensor:
        if isinstance(context.sight, Sequences) and context.sight.blocks:
            see = partial(context.sight.parts, window=self.window)
            return InParts.by(self.kernels).attention(q, k, v, how, see)
        mask = context.sight.mask(self.window)
        if context.dropout is not None and self.dropout:
            # the fused kernels draw their own masks, which would depend on the layout
            first_head = self.first_head + first
            drop = partial(context.dropout.scores, p=self.dropout, layer=self.layer, first_head=first_head)
            return plain_attention(q, k, v, mask, how, drop)
        return self.kernels.attention(q, k, v, mask, how)


class _Attend:
    """See `AttendCached`."""

    def __init__(self, core: AttentionCore, relative: Relative | None) -> None:
        self.core, self.relative = core, relative

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return self.core.kernels.attention(q, k, v, mask, self.core.how(self.relative, q.shape[1], k.shape[1]))

    def rows(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        if self.relative is None and not self.core.how(None, 1, 1).bent:
            return self.core.kernels.attention_of_rows(q, keys, values, self.core.scale)
        ones = zip(q[:, None, None], keys, values, strict=True)
        alone = [self(one, k.transpose(1, 2), v.transpose(1, 2), ALL) for one, k, v in ones]
        return torch.cat(alone).squeeze(1)
