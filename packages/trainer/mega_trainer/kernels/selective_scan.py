"""Mamba-2's selective scan over tokens (arXiv:2405.21060): a recurrence of states, computed chunk by chunk as GEMMs.

    S[t] = exp(a[t]) S[t-1] + d[t] x[t] B[t]^T       a[t] = d[t] A       y[t] = S[t] C[t]

With c the running sum of a within a chunk, a token reads those of its chunk by (C[t] . B[s]) exp(c[t] - c[s]), and earlier
ones by the chunk's initial state. The work within chunks is here; passing states from chunk to chunk is in
`parallel.recurrent_state`.

Legend: B batch, S tokens, n chunks of Q tokens, H heads of P channels, G groups of r heads with the same B and C, N states of
a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.kernels.leaf_compiler import apply_autograd_function
from mega_trainer.kernels.sequence_chunks import SequenceChunks, zero_tokens_outside_mask

# Maps M [B, n, H] and Z [B, n, H, P, N] of the chunks to the state before each chunk [B, n, H, P, N].
ScanPass = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ScanInputs:
    """Inputs of Mamba's selective scan for each token: x, step size, decay, B and C.
    In Mamba-1 (`channel_scan`) each channel is a head of size 1, in one group.

    Attributes:
        x: [B, S, H, P].
        d: step size of each token, [B, S, H] in at least fp32.
        decay: A, decay rate of the state, [H], in Mamba-1 [H, N], in the dtype of d, negative.
        b, c: [B, S, G, N].
    """

    x: Tensor
    d: Tensor
    decay: Tensor
    b: Tensor
    c: Tensor


def selective_scan(steps: ScanInputs, chunks: SequenceChunks, pass_states: ScanPass) -> Tensor:
    """Return the outputs [B, S, H heads, P channels] of Mamba-2's recurrence, computed chunk by chunk.
    The computation is in the dtype of d; no state crosses documents.
    """
    dtype, groups = steps.d.dtype, steps.b.shape[2]
    x, d, b, c = (chunks.split_chunks(part.to(dtype)) for part in (steps.x, steps.d, steps.b, steps.c))
    b, c = b.movedim(3, 2), c.movedim(3, 2)  # [B, n, G, Q, N]
    x = torch.unflatten((x * d.unsqueeze(-1)).movedim(3, 2), 2, (groups, -1))  # [B, n, G, r, Q, P]
    total = (d * steps.decay).cumsum(2)
    inside = _within_chunks(total, x, b, c, chunks.same_document_mask)
    last = (
        None if chunks.same_document_mask is None else chunks.same_document_mask[:, :, -1]
    )  # tokens of the chunk's last document
    kept = _by_group(zero_tokens_outside_mask((total[:, :, -1:] - total).exp(), last), groups)
    added = (x * kept.unsqueeze(-1)).mT @ b.unsqueeze(3)
    carried = None if chunks.document_started_before_chunk is None else chunks.document_started_before_chunk[:, :, -1]
    before = pass_states(zero_tokens_outside_mask(total[:, :, -1].exp(), carried), added.flatten(2, 3)).view_as(added)
    reach = _by_group(zero_tokens_outside_mask(total.exp(), chunks.document_started_before_chunk), groups)
    y = inside + (c.unsqueeze(3) @ before.mT) * reach.unsqueeze(-1)
    return chunks.join_chunks(y.flatten(2, 3).movedim(2, 3), steps.x.shape[1])


def _within_chunks(total: Tensor, x: Tensor, b: Tensor, c: Tensor, same_document_mask: Tensor | None) -> Tensor:
    """Return the contribution of each chunk's tokens to its own outputs: [B, n, G, r, Q, P]."""
    y: Tensor = apply_autograd_function(_WithinChunks, _by_group(total, b.shape[2]), x, b, c, same_document_mask)
    return y


class _WithinChunks(Function):
    """Product y = W x with W[t, s] = (c[t] . b[s]) exp(total[t] - total[s]); saves nothing of size Q x Q."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, x: Tensor, b: Tensor, c: Tensor, same_document_mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(total, x, b, c, same_document_mask)
        return ((c @ b.mT).unsqueeze(3) * _decays(total, same_document_mask)) @ x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, x, b, c, together = ctx.saved_tensors
        scores, decays = (c @ b.mT).unsqueeze(3), _decays(total, together)
        weights = scores * decays
        dweights = dy @ x.mT
        dscores = (dweights * decays).sum(3)
        dbetween = dweights.mul_(weights)
        dtotal = dbetween.sum(-1) - dbetween.sum(-2)
        return dtotal, weights.mT @ dy, dscores.mT @ c, dscores @ b, None


def _decays(total: Tensor, same_document_mask: Tensor | None) -> Tensor:
    """Return the decay between two tokens of a chunk and document: [B, n, G, r, Q, Q], zero for other pairs."""
    size = total.shape[-1]
    hidden = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    hidden = hidden if same_document_mask is None else (hidden | ~same_document_mask)[:, :, None, None]
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(hidden, float("-inf")).exp_()


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Reshape [B, n, Q, H] to [B, n, G, r, Q]."""
    return torch.unflatten(x.movedim(3, 2), 2, (groups, -1))
