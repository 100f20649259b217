"""Mamba-2's scan over tokens (arXiv:2405.21060): a recurrence of states, computed chunk by chunk as products of matrices.

    S[t] = exp(a[t]) S[t-1] + d[t] x[t] B[t]^T       a[t] = d[t] A       y[t] = S[t] C[t]

With c the running sum of a within a chunk, a token sees those of its chunk by (C[t] . B[s]) exp(c[t] - c[s]), and those
before by the state that the chunk begins with. What is computed of the chunks alone, and what brings states from one to
the next (`parallel.state`), are apart.

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

from mega_trainer.kernels.chunks import Chunks, masked
from mega_trainer.kernels.leaves import recorded

# M [B, n, H] and Z [B, n, H, P, N] of each chunk to the states before each [B, n, H, P, N].
Pass = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Steps:
    """What a scan is given of each token.

    Attributes:
        x: [B, S, H, P].
        d: how long each step is, [B, S, H] in at least fp32.
        decay: A, how fast a state decays, [H], as wide, below zero.
        b, c: [B, S, G, N].
    """

    x: Tensor
    d: Tensor
    decay: Tensor
    b: Tensor
    c: Tensor


def scan(steps: Steps, chunks: Chunks, pass_states: Pass) -> Tensor:
    """y [B, S, H, P], computed in the dtype of d and returned in it; no state leaves its document."""
    dtype, groups = steps.d.dtype, steps.b.shape[2]
    x, d, b, c = (chunks.cut(part.to(dtype)) for part in (steps.x, steps.d, steps.b, steps.c))
    b, c = b.movedim(3, 2), c.movedim(3, 2)  # [B, n, G, Q, N]
    x = torch.unflatten((x * d.unsqueeze(-1)).movedim(3, 2), 2, (groups, -1))  # [B, n, G, r, Q, P]
    total = (d * steps.decay).cumsum(2)
    inside = _inside(total, x, b, c, chunks.together)
    last = None if chunks.together is None else chunks.together[:, :, -1]  # of the document that goes on
    kept = _by_group(masked((total[:, :, -1:] - total).exp(), last), groups)
    added = (x * kept.unsqueeze(-1)).mT @ b.unsqueeze(3)
    carried = None if chunks.continued is None else chunks.continued[:, :, -1]
    before = pass_states(masked(total[:, :, -1].exp(), carried), added.flatten(2, 3)).view_as(added)
    reach = _by_group(masked(total.exp(), chunks.continued), groups)
    y = inside + (c.unsqueeze(3) @ before.mT) * reach.unsqueeze(-1)
    return chunks.join(y.flatten(2, 3).movedim(2, 3), steps.x.shape[1])


def _inside(total: Tensor, x: Tensor, b: Tensor, c: Tensor, together: Tensor | None) -> Tensor:
    """What the tokens of each chunk get from its own: [B, n, G, r, Q, P]."""
    y: Tensor = recorded(_Inside, _by_group(total, b.shape[2]), x, b, c, together)
    return y


class _Inside(Function):
    """y = W x with W[t, s] = (c[t] . b[s]) exp(total[t] - total[s]): keeps its factors, and nothing of size Q x Q."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, x: Tensor, b: Tensor, c: Tensor, together: Tensor | None) -> Tensor:
        ctx.save_for_backward(total, x, b, c, together)
        return ((c @ b.mT).unsqueeze(3) * _decays(total, together)) @ x

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


def _decays(total: Tensor, together: Tensor | None) -> Tensor:
    """How much of what a token wrote a later one of its chunk and document finds: [B, n, G, r, Q, Q], zero for others."""
    size = total.shape[-1]
    hidden = torch.ones(size, size, dtype=torch.bool, device=total.device).triu(1)
    hidden = hidden if together is None else (hidden | ~together)[:, :, None, None]
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(hidden, float("-inf")).exp_()


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, n, Q, H] -> [B, n, G, r, Q]."""
    return torch.unflatten(x.movedim(3, 2), 2, (groups, -1))
