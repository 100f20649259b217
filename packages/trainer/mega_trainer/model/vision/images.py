"""The images of a forward pass: which rank computes which, and where their features stand among the tokens.

Legend: n images, or tiles that images are cut in, P features of one, B batch, S sequence, R ranks that share a micro-batch's images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mega_trainer.comm import Group, all_gather, reduce_scatter
from mega_trainer.kernels.masks import ALL, Band, Part

Block = tuple[int, range]  # a row, and tokens of it that see one another

IMAGES = 0  # the axis of [n, P, D] that ranks share


@dataclass(frozen=True)
class Images:
    """The images of a micro-batch, all of them, and where tokens find their features.

    Attributes:
        pixels: fp32 [n, 3, H, W] in host memory, normalised; where images have shapes of their own [3, H, W] of each.
        rows: int64 [B, S], of all features [n P] the one that stands at a token; -1 at tokens of text.
        features: [n P, D], where they are known already, as in generation.
        positions: int64 [3, B, S], the time, line and column that the decoder turns tokens by; None: all three are their
            positions in the text.
    """

    pixels: Tensor | Sequence[Tensor]
    rows: Tensor
    features: Tensor | None = None
    positions: Tensor | None = None

    def known(self, features: Tensor) -> Images:
        """The same images, whose features are known."""
        return replace(self, features=features)

    def part(self, places: Any) -> Images:
        """The same images, for the tokens at some places of the sequences."""
        positions = None if self.positions is None else self.positions[:, :, places]
        return replace(self, rows=self.rows[:, places], positions=positions)

    def dealt(self, rank: int, ranks: int) -> Tensor:
        """Those squares that this rank, of those that share them, computes: as many on each, the last ones black.

        One at least, for where one rank has a gradient of the tower, all must have one.
        """
        assert isinstance(self.pixels, Tensor)
        share = max(1, -(-len(self.pixels) // ranks))
        own = self.pixels[rank * share : (rank + 1) * share]
        return F.pad(own, (0, 0, 0, 0, 0, 0, 0, share - len(own)))


def sharing(groups: Sequence[Group]) -> tuple[int, int]:
    """The number of this rank among those of all combinations of `groups`, the last of which counts fastest, and theirs."""
    rank, ranks = 0, 1
    for group in groups:
        rank, ranks = rank * group.size + group.rank, ranks * group.size
    return rank, ranks


def image_blocks(images: np.ndarray, begins: np.ndarray | None = None) -> list[Block]:
    """Where tokens of images stand side by side, two at least: of `images`, bool [B, S], those with the same of `begins`."""
    found: list[Block] = []
    for row, own in enumerate(np.where(images, 0 if begins is None else begins, -1)):
        cuts = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(own)]
        found += [(row, range(a, b)) for a, b in pairwise(cuts) if own[a] >= 0 and b - a > 1]
    return found


def ahead(blocks: Sequence[Block], queries: range, keys: range) -> list[Part]:
    """What queries see of keys of their block behind them, which no window hides; the queries are the keys or all before."""
    found = []
    for row, block in blocks:
        here, there = (
            range(max(block.start, places.start), min(block.stop, places.stop)) for places in (queries, keys)
        )
        band = ALL
        if queries == keys:  # each but the last sees from the next one on
            here, there, band = here[:-1], there[1:], Band(left=0)
        found += [Part(slice(row, row + 1), here, there, band)] if here and there else []
    return found


def placed(x: Tensor, features: Tensor, rows: Tensor) -> Tensor:
    """Embeddings x [B, S, D] with those at placeholders overwritten by `features` [n P, D]; `rows` as in `Images`."""
    return torch.where((rows < 0).unsqueeze(-1), x, features[rows.clamp(min=0)].to(x.dtype))


def gathered(features: Tensor, group: Group, *, partial: bool) -> Tensor:
    """The features of all ranks' images: [n/R, P, D] -> [n, P, D].

    `partial` says that each rank's gradient is that of its own tokens, to be summed; else all ranks have the same one.
    """
    if group.size == 1:
        return features
    y: Tensor = _Gather.apply(features, group, partial)  # type: ignore[no-untyped-call]
    return y


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, group: Group, partial: bool) -> Tensor:
        ctx.group, ctx.partial = group, partial
        return all_gather(features, group, IMAGES)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        group: Group = ctx.group
        if ctx.partial:
            return reduce_scatter(dy, group, IMAGES), None, None
        share = len(dy) // group.size
        return dy[group.rank * share : (group.rank + 1) * share].contiguous(), None, None
