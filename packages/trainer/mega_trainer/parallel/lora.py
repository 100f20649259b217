"""Adapters of low rank beside parallel layers (LoRA, arXiv:2106.09685): Y += s (X A^T) B^T.

What lies between the two products is narrow, so that is what ranks exchange; A and B are split as the layer beside them is:

    column   X [B, S or S/T, D]   A [r, D] whole   U = X A^T, gathered over S under sequence parallelism   B [N/T, r]
    row      X [B, S, D/T]        A [r, D/T]       U = sum_T X A^T, to [B, S or S/T, r]                    B [N, r] whole

Legend: B batch, S sequence, D input width, N output width, T tensor ranks, M rows of experts, G experts, r rank, R the sum
of the ranks of projections side by side, which share one product X A^T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mega_trainer.kernels.grouped import Rows
from mega_trainer.parallel.linear import Linear


@dataclass(frozen=True)
class Update:
    """What an adapter adds to: columns [first, first + rows) of a layer's output, by an adapter of `rank`, times `scale`."""

    first: int
    rows: int
    rank: int
    scale: float


class Adapter(nn.Module):
    """The adapters of projections that one product makes.

    Args:
        linear: for both products.
        a: [R, D], or a part of its columns.
        b: of each adapter [rows, r].
        updates: what each adds to, in the order of a layer's columns.
        meet: makes of this rank's U what its B are to be multiplied with.
    """

    def __init__(
        self,
        linear: Linear,
        a: nn.Parameter,
        b: Sequence[nn.Parameter],
        updates: Sequence[Update],
        meet: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.linear, self.updates, self.meet = linear, tuple(updates), meet
        self.a, self.b = a, nn.ParameterList(b)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The layer's input and its output, with the updates added to this."""
        narrow = torch.split(self.meet(self.linear(x, self.a)), [update.rank for update in self.updates], -1)
        parts, done = [], 0
        for update, u, b in zip(self.updates, narrow, self.b, strict=True):
            end = update.first + update.rows
            parts += [y[..., done : update.first], y[..., update.first : end] + self.linear(u * update.scale, b)]
            done = end
        return torch.cat([*parts, y[..., done:]], -1)


class ExpertAdapter(nn.Module):
    """An adapter for each of this rank's experts: A [G, r, D] and B [G, N, r], or a part of D or N.

    A part of D makes a part of the sum over the ranks that share the experts, as the layer's own output is.
    """

    def __init__(self, linear: Callable[..., Tensor], a: nn.Parameter, b: nn.Parameter, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.a, self.b = a, b

    def forward(self, x: Tensor, y: Tensor, rows: Rows) -> Tensor:
        """Rows sorted by expert [M, D] and the layer's output for them [M, N]: that, with the updates."""
        return y + self.linear(self.linear(x, self.a, rows) * self.scale, self.b, rows)
