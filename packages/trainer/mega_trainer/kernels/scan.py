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

import torch
from torch import Tensor

from mega_trainer.kernels.chunks import Chunks, masked

# M [B, n, H] and Z [B, n, H, P, N] of each chunk to the states before each [B, n, H, P, N].
Pass = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Steps:
    """What a scan is given of each token.

    Attributes:
        x: [B, S, H, P].
        d: how long each step is, [B, S, H] in at least fp32.
        a: the logarithm of how much of a state stays, [B, S, H], as wide, none above zero.
        b, c: [B, S, G, N].
    """

    x: Tensor
    d: Tensor
    a: Tensor
    b: Tensor
    c: Tensor


def scan(steps: Steps, chunks: Chunks, pass_states: Pass) -> Tensor:
    """y [B, S, H, P], computed in the dtype of d and returned in it; no state leaves its document."""
    dtype, groups = steps.d.dtype, steps.b.shape[2]
    x, d, a, b, c = (chunks.cut(part.to(dtype)) for part in (steps.x, steps.d, steps.a, steps.b, steps.c))
    b, c = b.movedim(3, 2), c.movedim(3, 2)  # [B, n, G, Q, N]
    x = torch.unflatten((x * d.unsqueeze(-1)).movedim(3, 2), 2, (groups, -1))  # [B, n, G, r, Q, P]
    total = a.cumsum(2)
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
    size, sums = x.shape[-2], _by_group(total, b.shape[2])
    seen = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    seen = seen if together is None else (seen & together)[:, :, None, None]
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(~seen, float("-inf"))
    return ((c @ b.mT).unsqueeze(3) * between.exp()) @ x


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, n, Q, H] -> [B, n, G, r, Q]."""
    return torch.unflatten(x.movedim(3, 2), 2, (groups, -1))
