"""Mamba-1's selective scan over tokens (arXiv:2312.00752), whose decay differs by channel and by state.

    S[t] = exp(d[t] A) * S[t-1] + d[t] x[t] B[t]^T        y[t] = S[t] C[t]        (* is elementwise)

Unlike Mamba-2's, tokens of a chunk do not reach each other by one number per head, so the scan is not a GEMM: the tokens of a
chunk are computed one after the other, and all chunks at once. A first pass finds what each chunk adds to the state before it,
`parallel.recurrent_state` passes the states on, and a second pass computes the outputs. The backward computes the states
again, so that the forward saves none of them within chunks.

Legend: B batch, S tokens, n chunks of Q tokens, I channels, N states of a channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.kernels.leaf_compiler import apply_autograd_function
from mega_trainer.kernels.selective_scan import ScanInputs, ScanPass
from mega_trainer.kernels.sequence_chunks import SequenceChunks, zero_tokens_outside_mask


def channel_scan(steps: ScanInputs, chunks: SequenceChunks, pass_states: ScanPass) -> Tensor:
    """Return the outputs [B, S, I, 1] of Mamba-1's recurrence, computed chunk by chunk.
    The channels are heads of size 1 in one group, and `decay` is [I, N]. The computation is in the dtype of d; no state crosses
    documents.
    """
    dtype = steps.d.dtype
    parts = (
        steps.d,
        steps.x.squeeze(-1).to(dtype) * steps.d,
        steps.b.squeeze(2).to(dtype),
        steps.c.squeeze(2).to(dtype),
    )
    d, dx, b, c = map(chunks.split_chunks, parts)
    starts = chunks.chunk_document_starts
    continues = None if starts is None else starts < torch.arange(chunks.size, device=d.device)
    nothing = d.new_zeros(*d.shape[:2], *steps.decay.shape)
    added = apply_autograd_function(_TokenByToken, d, dx, steps.decay, b, None, nothing, continues)[1]
    maps = (d.sum(2).unsqueeze(-1) * steps.decay).exp().flatten(2)
    carried = None if chunks.document_started_before_chunk is None else chunks.document_started_before_chunk[:, :, -1]
    before = pass_states(zero_tokens_outside_mask(maps, carried), added.flatten(2)[..., None, None]).view_as(added)
    y: Tensor = apply_autograd_function(_TokenByToken, d, dx, steps.decay, b, c, before, continues)[0]
    return chunks.join_chunks(y, steps.d.shape[1]).unsqueeze(-1)


class _TokenByToken(Function):
    """Outputs [B, n, Q, I] (None without `c`) and last state of each chunk, from the state before it; saves only its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        d: Tensor,
        dx: Tensor,
        decay: Tensor,
        b: Tensor,
        c: Tensor | None,
        state: Tensor,
        continues: Tensor | None,
    ) -> tuple[Tensor | None, Tensor]:
        ctx.save_for_backward(d, dx, decay, b, c, state, continues)
        y = None if c is None else torch.empty_like(dx)
        for t in _tokens(d):
            state = _decays(d, decay, continues, t) * state + dx[:, :, t].unsqueeze(-1) * b[:, :, t].unsqueeze(-2)
            if c is not None and y is not None:
                y[:, :, t] = (state @ c[:, :, t].unsqueeze(-1)).squeeze(-1)
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor) -> tuple[Tensor | None, ...]:
        d, dx, decay, b, c, state, continues = ctx.saved_tensors
        states = state.new_empty(1 + d.shape[2], *state.shape)
        states[0] = state
        for t in _tokens(d):
            states[t + 1] = _decays(d, decay, continues, t) * states[t]
            states[t + 1] += dx[:, :, t].unsqueeze(-1) * b[:, :, t].unsqueeze(-2)
        dd, ddx, db, ddecay = torch.empty_like(d), torch.empty_like(dx), torch.empty_like(b), torch.zeros_like(decay)
        dc = None if c is None else torch.empty_like(c)
        for t in reversed(_tokens(d)):
            if c is not None and dc is not None and dy is not None:
                column = dy[:, :, t].unsqueeze(-1)
                dc[:, :, t] = (states[t + 1].mT @ column).squeeze(-1)
                ds = ds + column * c[:, :, t].unsqueeze(-2)
            ddx[:, :, t] = (ds @ b[:, :, t].unsqueeze(-1)).squeeze(-1)
            db[:, :, t] = (ds.mT @ dx[:, :, t].unsqueeze(-1)).squeeze(-1)
            ds = ds * _decays(d, decay, continues, t)
            exponents = ds * states[t]
            dd[:, :, t] = (exponents * decay).sum(-1)
            ddecay += (exponents * d[:, :, t].unsqueeze(-1)).sum((0, 1))
        return dd, ddx, ddecay, db, dc, ds, None


def _tokens(d: Tensor) -> range:
    """Return the tokens of a chunk; the first alone where memory is counted, since each takes the same."""
    return range(1 if d.is_meta else d.shape[2])


def _decays(d: Tensor, decay: Tensor, continues: Tensor | None, t: int) -> Tensor:
    """Return exp(d A) of token t of each chunk, [B, n, I, N]; zero where it begins a document."""
    decays = (d[:, :, t].unsqueeze(-1) * decay).exp()
    return decays if continues is None else decays * continues[:, :, t, None, None]
