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
from mega_trainer.kernels.kernel_interface import RelativePositionBias, ScoreTransform


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

    def add_to_scores(self, how: ScoreTransform, queries: int, keys: int) -> ScoreTransform:
        """Return a copy of the score transform `how` with this bias for the last `queries` of `keys` positions."""
        return replace(how, bias=self.make_position_bias(queries, keys))


def bucket_distances(distances: Tensor, count: int, max_distance: int, *, causal: bool) -> Tensor:
    """Return the relative position bucket of each distance key - query, int64 of any shape, among `count` buckets;
    logarithms are in fp32, as in transformers and Megatron.
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
