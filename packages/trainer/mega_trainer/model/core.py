"""Attention proper, between the projections: one rank's heads of queries, keys and values to their outputs.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, d size of queries and keys, e of values.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mega_trainer.kernels.base import Scores
from mega_trainer.kernels.torch import plain_attention
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context


class AttentionCore(nn.Module):
    """What one layer's heads do with their scores.

    Args:
        build: of the model.
        layer: number of the layer.
        scale: factor on the scores; 1 / sqrt(d) by default.
        sinks: this rank's [H], if the model has them.
        recompute: the backward computes it again.
    """

    def __init__(
        self,
        build: Builder,
        layer: int,
        *,
        scale: float | None = None,
        sinks: nn.Parameter | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        config, tp = build.config, build.groups.tp
        self.layer, self.recompute, self.kernels = layer, recompute, build.kernels
        self.window, self.dropout, self.softcap = (
            config.window(layer),
            config.attention_dropout,
            config.attention_softcap,
        )
        self.scale, self.sinks = scale or 1 / math.sqrt(config.head_size), sinks
        self.first_head = tp.rank * config.num_attention_heads // tp.size

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q [B, S, H, d], k [B, T, K, d], v [B, T, K, e] -> [B, S, H, e]."""
        if self.recompute and self.training:
            y: Tensor = checkpoint(self._attend, q, k, v, context, use_reentrant=False, preserve_rng_state=False)
            return y
        return self._attend(q, k, v, context)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        how, mask = Scores(self.scale, self.softcap, self.sinks), context.sight.mask(self.window)
        if context.dropout is not None and self.dropout:
            # the fused kernels draw their own masks, which would depend on the layout
            drop = partial(context.dropout.scores, p=self.dropout, layer=self.layer, first_head=self.first_head)
            return plain_attention(q, k, v, mask, how, drop)
        return self.kernels.attention(q, k, v, mask, how)
