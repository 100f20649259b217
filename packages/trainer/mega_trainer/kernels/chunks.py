"""Sequences cut in chunks, for layers that keep a state: what is where, and which tokens are of one document.

Legend: B batch, S tokens of a rank, n chunks of Q tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Chunks:
    """The chunks of a rank's tokens: none reaches from one span of the sequence into another, the last of each is padded.

    Attributes:
        spans: so many pieces of the sequence, as long as each other, are what the rank holds.
        size: Q.
        reach: how many tokens of its document stand before each token, int64 [B, S]; None: all before it.
        whole: these are whole sequences, so that there is no state before them, and nobody wants the one behind them.
        starts: where their documents start, all rows behind one another, and where the last ends: int64 [documents + 1], on
            the device and on the host; None: each row is one.
    """

    spans: int
    size: int
    reach: Tensor | None = None
    whole: bool = False
    starts: tuple[Tensor, Tensor] | None = None

    def cut(self, x: Tensor) -> Tensor:
        """[B, S, ..] -> [B, n, Q, ..], zeros behind the end of each span."""
        parts = x.reshape(x.shape[0], self.spans, -1, *x.shape[2:])
        padding = -parts.shape[2] % self.size
        parts = F.pad(parts, (0, 0) * (parts.dim() - 3) + (0, padding)) if padding else parts
        return parts.reshape(x.shape[0], -1, self.size, *x.shape[2:])

    def join(self, x: Tensor, tokens: int) -> Tensor:
        """[B, n, Q, ..] -> [B, S = tokens, ..], the inverse of `cut`."""
        parts = x.reshape(x.shape[0], self.spans, -1, *x.shape[3:])
        return parts[:, :, : tokens // self.spans].flatten(1, 2)

    @cached_property
    def begins(self) -> Tensor | None:
        """Where in its chunk each token's document begins, below zero if before it: int64 [B, n, Q]; None: all so.

        What pads a span is of its last document, so that a state comes through it.
        """
        if self.reach is None:
            return None
        parts = self.reach.reshape(len(self.reach), self.spans, -1)
        tokens = parts.shape[2]
        more = parts[:, :, -1:] + torch.arange(1, 1 + -tokens % self.size, device=parts.device)
        reach = torch.cat([parts, more], 2).reshape(len(parts), -1, self.size)
        return torch.arange(self.size, device=parts.device) - reach

    @cached_property
    def together(self) -> Tensor | None:
        """Whether two tokens of a chunk are of one document: bool [B, n, Q, Q]; None: all are."""
        return None if self.begins is None else self.begins[..., :, None] == self.begins[..., None, :]

    @cached_property
    def continued(self) -> Tensor | None:
        """Whether a token's document began before its chunk: bool [B, n, Q]; None: all did."""
        return None if self.begins is None else self.begins < 0


def masked(x: Tensor, there: Tensor | None) -> Tensor:
    """x [.., H] where `there` [..] says so, else zero."""
    return x if there is None else x * there.unsqueeze(-1)
