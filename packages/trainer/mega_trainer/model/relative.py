"""Relative positions as T5 has them (arXiv:1910.10683, section 2.1): tables of addends by buckets of distances.

Legend: H heads, T tensor-parallel ranks, S queries, K keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mega_ckpt.pieces import Piece
from mega_common.encoder import RelativeConfig
from mega_trainer.device import to_device
from mega_trainer.kernels.base import Scores
from mega_trainer.kernels.bias import DistanceBias

if TYPE_CHECKING:
    from mega_trainer.model.builder import Builder
    from mega_trainer.model.context import Context


@dataclass(frozen=True)
class Relative:
    """A table and how it is read.

    Attributes:
        table: this rank's heads of each bucket, [buckets, H/T].
        causal: all buckets are for keys before the query; else half of them for those behind it.
    """

    table: Tensor
    config: RelativeConfig
    causal: bool
    _made: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def of(self, queries: int, keys: int) -> DistanceBias:
        """What it adds to the scores of S queries, which stand at the end of K keys."""
        if (queries, keys) not in self._made:
            distances = torch.arange(1 - keys, queries)
            places = buckets(distances, self.config.buckets, self.config.max_distance, causal=self.causal)
            self._made[queries, keys] = to_device(places, self.table.device)
        return DistanceBias(nn.functional.embedding(self._made[queries, keys], self.table).t(), keys - 1)

    def of_scores(self, how: Scores, queries: int, keys: int) -> Scores:
        """What becomes of the scores with it."""
        return replace(how, bias=self.of(queries, keys))


class OwnTable(nn.Module):
    """The table of a layer that shares none."""

    def __init__(self, build: Builder, name: str, *, causal: bool) -> None:
        super().__init__()
        self.config, self.causal, self.table = build.config.relative, causal, relative_table(build, name)

    def within(self, context: Context) -> Context:
        """What the layer's attention is to know."""
        return replace(context, relative=Relative(self.table, self.config, self.causal))


def relative_table(build: Builder, name: str) -> nn.Parameter:
    """This rank's columns [buckets, H/T] of a table, named without `.weight`."""
    rows, heads, tp = build.config.relative.buckets, build.config.num_attention_heads, build.groups.tp
    own = heads // tp.size
    piece = Piece(f"{name}.weight", (rows, heads), (0, tp.rank * own), (0, 0), (rows, own))
    return build.parameter((rows, own), [piece], std=build.config.init_std)


def buckets(distances: Tensor, count: int, most: int, *, causal: bool) -> Tensor:
    """The bucket of each distance key - query, int64 of any shape; logarithms are in fp32, as transformers and Megatron have them."""
    base = torch.zeros_like(distances)
    if causal:
        away = (-distances).clamp(min=0)
    else:
        count //= 2
        base, away = (distances > 0) * count, distances.abs()
    exact = count // 2
    wider = torch.log(away.clamp(min=1).float() / exact) / math.log(most / exact) * (count - exact)
    return base + torch.where(away < exact, away, (exact + wider.long()).clamp(max=count - 1))
