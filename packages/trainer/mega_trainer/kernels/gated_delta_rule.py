"""Gated delta rule (arXiv:2412.06464): a recurrence of states, computed chunk by chunk with a triangular solve in each.

Each value head has a state S [K, V], which a token changes and reads:

    S = (I - beta k k^T) exp(g) S + beta k v^T          y = S^T q,   where k is k / |k| and q is q / (|q| sqrt(K))

The decay g is a number, or one per key channel as in Kimi Delta Attention (arXiv:2510.26692), where exp(g) is a diagonal
matrix; below, exp(c) then multiplies the channels of q and k within their products.

Within a chunk, c the running sum of g, and L the strictly lower part of beta_i (k_i . k_j) exp(c_i - c_j):

    U = (I + L)^-1 (beta v)     W = (I + L)^-1 (beta exp(c) k)     R = U - W S     (what the tokens write, corrected by S)
    y = exp(c) q S + [(q_i . k_j) exp(c_i - c_j), i >= j] R          S' = exp(c_Q) S + (exp(c_Q - c) k)^T R

So a chunk acts on the state as an affine map, S' = M S + Z with M a matrix [K, K]. The work within chunks is here; passing
states from chunk to chunk is in `parallel.recurrent_state`.

Legend: B batch, S tokens, n chunks of Q tokens, G key heads, H value heads, r = H/G of one key head, K and V widths of keys and
values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.kernels.sequence_chunks import SequenceChunks

DIRECT = 16  # tokens whose products with decays per channel are computed pair by pair
EPS = 1e-6  # added to |k|^2 and |q|^2
# Maps M [B, n, H, K, K] and Z [B, n, H, K, V] of the chunks to the state before each chunk [B, n, H, K, V].
DeltaRulePass = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DeltaRuleInputs:
    """Inputs of the gated delta rule for each token: query, key, value, decay and write strength.

    Attributes:
        q, k: [B, S, G, K], not normalised.
        v: [B, S, H, V].
        g: logarithm of the decay of the state, [B, S, H], or of each of its key channels, [B, S, H, K] (then G = H), in
            at least fp32, at most 0.
        beta: share of a key's value that is overwritten, [B, S, H] in the dtype of g, between 0 and 1, or up to 2 for
            transitions with negative eigenvalues.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def gated_delta_rule(updates: DeltaRuleInputs, chunks: SequenceChunks, pass_states: DeltaRulePass) -> Tensor:
    """Return the outputs [B, S, H value heads, V] of the gated delta rule, computed chunk by chunk.
    The computation is in the dtype of g; no state crosses documents.
    """
    dtype, groups, per_head = updates.g.dtype, updates.k.shape[2], updates.g.dim() == 3
    parts = (updates.q, updates.k, updates.v, updates.g, updates.beta)
    q, k, v, g, beta = (_by_group(chunks.split_chunks(part.to(dtype)), groups) for part in parts)
    q, k, beta = _l2_normalize(q) * k.shape[-1] ** -0.5, _l2_normalize(k), beta.unsqueeze(-1)
    sums = (g.unsqueeze(-1) if per_head else g).cumsum(-2)
    since_start, to_end, through, hidden = _decays(sums, chunks)
    if per_head:
        between = (sums - sums.mT).masked_fill(hidden, float("-inf")).exp()
        lower, reads = k @ k.mT * beta * between, q @ k.mT * between
    else:
        lower, reads = _channel_scores(torch.stack([beta * k, q]), k, sums).masked_fill(hidden, 0)
    right = torch.cat([beta * v, beta * since_start * k], -1)
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    ends, unit = (to_end * k).mT, torch.eye(k.shape[-1], dtype=dtype, device=k.device)
    before = pass_states((through * unit - ends @ w).flatten(2, 3), (ends @ u).flatten(2, 3))
    before = torch.unflatten(before, 2, (groups, -1))
    carried = since_start * (q @ before) if per_head else (since_start * q) @ before
    y = carried + reads @ (u - w @ before)
    return chunks.join_chunks(y.flatten(2, 3).movedim(2, 3), updates.v.shape[1])


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Reshape [B, n, Q, H, ..] to [B, n, G, r, Q, ..]."""
    return torch.unflatten(x.movedim(3, 2), 2, (groups, -1))


def _l2_normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _decays(sums: Tensor, chunks: SequenceChunks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return decay factors, zero across documents, from the running sums of g [.., Q, 1 or K].

    Returns:
        Decays from the chunk's start to a token [.., Q, 1 or K], from a token's write to the chunk's end [.., Q, 1 or K],
        and from the chunk's start to its end [.., 1, 1 or K]; and the mask of pairs (token, other token) where the first
        does not read the second, because it is later or in another document [.., Q, Q].
    """
    size, last = sums.shape[-2], sums[..., -1:, :]
    hidden = torch.ones(size, size, dtype=torch.bool, device=sums.device).triu(1)
    since_start, to_end, through = sums.exp(), (last - sums).exp(), last.exp()
    if chunks.same_document_mask is not None and chunks.document_started_before_chunk is not None:
        together = chunks.same_document_mask[:, :, None, None]
        continued = chunks.document_started_before_chunk[:, :, None, None, :, None]
        hidden = hidden | ~together
        since_start, to_end, through = (
            since_start * continued,
            to_end * together[..., -1, :, None],
            through * continued[..., -1:, :],
        )
    return since_start, to_end, through, hidden


def _channel_scores(rows: Tensor, k: Tensor, sums: Tensor) -> Tensor:
    """Return the products of earlier tokens' keys with `rows`, whose channels decay in between.

    The score of tokens i >= j is sum_c rows[i, c] k[j, c] exp(sums[i, c] - sums[j, c]); pairs i < j are undefined. No
    exponent is positive: a block of later tokens with earlier ones splits it at the last of these, and becomes a GEMM.

    Args:
        rows: [2, .., Q, K].
        k: [.., Q, K].
        sums: running sums of the logarithms of the decays, [.., Q, K].

    Returns:
        [2, .., Q, Q].
    """
    size = k.shape[-2]
    if size <= DIRECT:
        later = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1).unsqueeze(-1)
        decays = (sums.unsqueeze(-2) - sums.unsqueeze(-3)).masked_fill(later, float("-inf")).exp()
        return ((decays * k.unsqueeze(-3)) @ rows.unsqueeze(-1)).squeeze(-1)
    half = (size + 1) // 2
    (rows, late), (k, late_k), (sums, late_sums) = (torch.split(x, [half, size - half], -2) for x in (rows, k, sums))
    at = sums[..., -1:, :]
    across = (late * (late_sums - at).exp()) @ (k * (at - sums).exp()).mT
    upper = F.pad(_channel_scores(rows, k, sums), (0, size - half))
    return torch.cat([upper, torch.cat([across, _channel_scores(late, late_k, late_sums)], -1)], -2)
