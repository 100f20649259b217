"""Sequences cut in chunks, for layers that keep a state: what is where, and which tokens are of one document.

Legend: B batch, S tokens of a rank, n chunks of Q tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Chunks:
    """The chunks of a rank's tokens: none reaches from one span of the sequence into another, the last of each is padded.

    Attributes:
        spans: where the tokens stand in the sequence, as many in each.
        size: Q.
        begins: int64 [B, S], where the document begins that a token is of, if documents are closed.
    """

    spans: Sequence[range]
    size: int
    begins: Tensor | None = None

    def cut(self, x: Tensor) -> Tensor:
        """[B, S, ..] -> [B, n, Q, ..], zeros behind the end of each span."""
        parts = x.unflatten(1, (len(self.spans), -1))
        padding = -parts.shape[2] % self.size
        parts = F.pad(parts, (0, 0) * (parts.dim() - 3) + (0, padding)) if padding else parts
        return parts.reshape(x.shape[0], -1, self.size, *x.shape[2:])

    def join(self, x: Tensor) -> Tensor:
        """[B, n, Q, ..] -> [B, S, ..], the inverse of `cut`."""
        parts = x.reshape(x.shape[0], len(self.spans), -1, *x.shape[3:])
        return parts[:, :, : len(self.spans[0])].flatten(1, 2)

    @cached_property
    def _cut_begins(self) -> Tensor | None:
        """As `begins`, [B, n, Q]; padding is of the last document, so that a state comes through it."""
        if self.begins is None:
            return None
        last = self.begins.unflatten(1, (len(self.spans), -1))[:, :, -1]
        behind = self.cut(torch.ones_like(self.begins)) == 0
        whole = self.cut(self.begins)
        return torch.where(behind, last.repeat_interleave(whole.shape[1] // len(self.spans), 1)[..., None], whole)

    @cached_property
    def together(self) -> Tensor | None:
        """Whether two tokens of a chunk are of one document: bool [B, n, Q, Q]; None: all are."""
        begins = self._cut_begins
        return None if begins is None else begins[..., :, None] == begins[..., None, :]

    @cached_property
    def continued(self) -> Tensor | None:
        """Whether a token's document began before its chunk: bool [B, n, Q]; None: all did."""
        begins = self._cut_begins
        if begins is None:
            return None
        starts = [place for span in self.spans for place in span[:: self.size]]
        return begins < torch.tensor(starts, device=begins.device)[None, :, None]


def masked(x: Tensor, there: Tensor | None) -> Tensor:
    """x [.., H] where `there` [..] says so, else zero."""
    return x if there is None else x * there.unsqueeze(-1)
