"""T5's relative position bias (arXiv:1910.10683, section 2.1): tables of score biases by distance bucket.

Legend: H heads, T tensor-parallel ranks, S queries, K keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from mega_common.encoder_config import RelativePositionConfig
from mega_trainer.distributed.device import to_device
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, RelativePositionBias


@dataclass(frozen=True)
class BucketedPositionBias:
    """T5's relative position bias table, with the buckets of distances that index it.

    Attributes:
        table: bias of this rank's heads in each bucket, [buckets, H/T].
        causal: all buckets are for keys before the query; else half of them are for keys after it.
    """

    table: Tensor
    config: RelativePositionConfig
    causal: bool
    _buckets: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def make_position_bias(self, queries: int, keys: int) -> RelativePositionBias:
        """Return the attention bias of the last `queries` positions of a sequence of `keys` positions."""
        if (queries, keys) not in self._buckets:
            distances = torch.arange(1 - keys, queries)
            buckets = bucket_distances(distances, self.config.buckets, self.config.max_distance, causal=self.causal)
            self._buckets[queries, keys] = to_device(buckets, self.table.device)
        return RelativePositionBias(nn.functional.embedding(self._buckets[queries, keys], self.table).t(), keys - 1)

    def add_to_scores(self, how: AttentionScoreTransform, queries: int, keys: int) -> AttentionScoreTransform:
        """Return a copy of the score transform `how` with this bias for the last `queries` of `keys` positions."""
        return replace(how, bias=self.make_position_bias(queries, keys))


@dataclass(frozen=True)
class LinearPositionBias:
    """ALiBi (arXiv:2108.12409): a bias of attention scores that falls linearly with the distance, by a slope per head.

    Attributes:
        slopes: slopes of this rank's heads, [H/T].
    """

    slopes: Tensor

    @classmethod
    def for_rank(
        cls, heads: int, rank: int, ranks: int, *, dtype: torch.dtype, device: torch.device
    ) -> LinearPositionBias:
        """Return the ALiBi position bias of the heads of one of `ranks` tensor ranks."""
        own = alibi_slopes(heads)[rank * heads // ranks : (rank + 1) * heads // ranks]
        return cls(to_device(torch.tensor(own, dtype=dtype), device))

    def make_position_bias(self, queries: int, keys: int) -> RelativePositionBias:
        """Return the attention bias of the last `queries` positions of a sequence of `keys` positions."""
        distances = torch.arange(1 - keys, queries, device=self.slopes.device)
        return RelativePositionBias(self.slopes[:, None] * distances, keys - 1)

    def add_to_scores(self, how: AttentionScoreTransform, queries: int, keys: int) -> AttentionScoreTransform:
        """Return a copy of the score transform with this bias for the last `queries` of `keys` positions."""
        return replace(how, bias=self.make_position_bias(queries, keys))


def alibi_slopes(heads: int) -> list[float]:
    """Return ALiBi's slope of each attention head: 2^(-8 i / n) for i = 1 .. n, the largest power of two <= heads.
    Further heads have slopes halfway between the first ones.
    """
    base = 2 ** int(math.log2(heads))
    between = [2.0 ** (-4 * (2 * index + 1) / base) for index in range(heads - base)]
    return [2.0 ** (-8 * (index + 1) / base) for index in range(base)] + between


# Bias of attention scores by distance, of all layers or of one.
PositionBias = BucketedPositionBias | LinearPositionBias


def bucket_distances(distances: Tensor, count: int, max_distance: int, *, causal: bool) -> Tensor:
    """Return the relative position bucket of each distance key - query, int64 of any shape.
    There are `count` buckets; logarithms are in fp32, as in transformers and Megatron.
    """
    base = torch.zeros_like(distances)
    if causal:
        away = (-distances).clamp(min=0)
    else:
        count //= 2
        base, away = (distances > 0) * count, distances.abs()
    exact = count // 2
    wider = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (count - exact)
    return base + torch.where(away < exact, away, (exact + wider.long()).clamp(max=count - 1))
