"""Chunks of sequences for recurrent layers: their positions, and their documents.

Legend: B batch, S tokens of a rank, n chunks of Q tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class SequenceChunks:
    """Chunks of a rank's tokens: none crosses from one span of the sequence into another, and the last of each span is
    padded.

    Attributes:
        spans: so many pieces of the sequence, as long as each other, are what the rank holds.
        size: Q.
        preceding_tokens: how many tokens of its document stand before each token, int64 [B, S]; None: all before it.
        whole: these are whole sequences, so that there is no state before them, and nobody wants the one behind them.
        cu_seqlens: where their documents start, all rows behind one another, and where the last ends: int64 [documents + 1], on
            the device and on the host; None: each row is one.
    """

    spans: int
    size: int
    preceding_tokens: Tensor | None = None
    whole: bool = False
    cu_seqlens: tuple[Tensor, Tensor] | None = None

    def split_chunks(self, x: Tensor) -> Tensor:
        """Split [B, S, ..] into [B, n, Q, ..], with zeros after the end of each span."""
        parts = x.reshape(x.shape[0], self.spans, -1, *x.shape[2:])
        padding = -parts.shape[2] % self.size
        parts = F.pad(parts, (0, 0) * (parts.dim() - 3) + (0, padding)) if padding else parts
        return parts.reshape(x.shape[0], -1, self.size, *x.shape[2:])

    def join_chunks(self, x: Tensor, tokens: int) -> Tensor:
        """Join [B, n, Q, ..] into [B, S = tokens, ..], the inverse of `split_chunks`."""
        parts = x.reshape(x.shape[0], self.spans, -1, *x.shape[3:])
        return parts[:, :, : tokens // self.spans].flatten(1, 2)

    @cached_property
    def chunk_document_starts(self) -> Tensor | None:
        """Start of each token's document relative to its chunk, below zero if before it: int64 [B, n, Q]; None: all
        before.

        What pads a span is of its last document, so that a state comes through it.
        """
        if self.preceding_tokens is None:
            return None
        parts = self.preceding_tokens.reshape(len(self.preceding_tokens), self.spans, -1)
        tokens = parts.shape[2]
        more = parts[:, :, -1:] + torch.arange(1, 1 + -tokens % self.size, device=parts.device)
        reach = torch.cat([parts, more], 2).reshape(len(parts), -1, self.size)
        return torch.arange(self.size, device=parts.device) - reach

    @cached_property
    def same_document(self) -> Tensor | None:
        """Mask of token pairs of a chunk in one document: bool [B, n, Q, Q]; None: all are."""
        return (
            None
            if self.chunk_document_starts is None
            else self.chunk_document_starts[..., :, None] == self.chunk_document_starts[..., None, :]
        )

    @cached_property
    def started_before(self) -> Tensor | None:
        """Mask of tokens whose document began before their chunk: bool [B, n, Q]; None: all did."""
        return None if self.chunk_document_starts is None else self.chunk_document_starts < 0


def mask_or_keep(x: Tensor, there: Tensor | None) -> Tensor:
    """Return x [.., H] where `there` [..] is true, else zero."""
    return x if there is None else x * there.unsqueeze(-1)
