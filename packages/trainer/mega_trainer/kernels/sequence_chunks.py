"""Chunks of sequences for recurrent layers, with the documents of their tokens.

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
    """Division of a rank's tokens into chunks of `size` for recurrences.
    No chunk crosses two spans of the sequence, and the last chunk of each span is padded.

    Attributes:
        spans: number of contiguous spans of the sequence that the rank holds, all of the same length.
        size: Q.
        preceding_tokens: number of earlier tokens in each token's document, int64 [B, S]; None: all earlier tokens.
        whole: the spans are whole sequences: no state is passed in, and the final state is not needed.
        cu_seqlens: starts of the documents, rows concatenated, and the end: int64 [documents + 1], on the device and on
            the host; None: each row is one document.
    """

    spans: int
    size: int
    preceding_tokens: Tensor | None = None
    whole: bool = False
    cu_seqlens: tuple[Tensor, Tensor] | None = None

    def split_chunks(self, x: Tensor) -> Tensor:
        """Split x [batch, tokens, ..] into chunks [batch, n, size, ..], with zeros after the end of each span."""
        parts = x.reshape(x.shape[0], self.spans, -1, *x.shape[2:])
        padding = -parts.shape[2] % self.size
        parts = F.pad(parts, (0, 0) * (parts.dim() - 3) + (0, padding)) if padding else parts
        return parts.reshape(x.shape[0], -1, self.size, *x.shape[2:])

    def join_chunks(self, x: Tensor, tokens: int) -> Tensor:
        """Join chunks [batch, n, size, ..] into [batch, tokens, ..], the inverse of `split_chunks`."""
        parts = x.reshape(x.shape[0], self.spans, -1, *x.shape[3:])
        return parts[:, :, : tokens // self.spans].flatten(1, 2)

    @cached_property
    def chunk_document_starts(self) -> Tensor | None:
        """Start of each token's document relative to its chunk, negative if before it; None without packed documents.
        It is int64 [batch, n, size].

        Padding belongs to the last document of its span, so that the state passes through it.
        """
        if self.preceding_tokens is None:
            return None
        parts = self.preceding_tokens.reshape(len(self.preceding_tokens), self.spans, -1)
        tokens = parts.shape[2]
        more = parts[:, :, -1:] + torch.arange(1, 1 + -tokens % self.size, device=parts.device)
        reach = torch.cat([parts, more], 2).reshape(len(parts), -1, self.size)
        return torch.arange(self.size, device=parts.device) - reach

    @cached_property
    def same_document_mask(self) -> Tensor | None:
        """Mask of a chunk's token pairs in one document, bool [batch, n, size, size]; None without documents."""
        starts = self.chunk_document_starts
        return None if starts is None else starts[..., :, None] == starts[..., None, :]

    @cached_property
    def document_started_before_chunk(self) -> Tensor | None:
        """Mask of tokens whose document began before their chunk, bool [batch, n, size]; None without documents."""
        return None if self.chunk_document_starts is None else self.chunk_document_starts < 0


def zero_tokens_outside_mask(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x [.., H] where `mask` [..] is true and zero elsewhere; x itself if `mask` is None."""
    return x if mask is None else x * mask.unsqueeze(-1)
