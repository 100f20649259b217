"""Recurrent states passed from chunk to chunk of a sequence, and from rank to rank under context parallelism.

A chunk of tokens maps the state before it affinely, S -> M S + Z: in Mamba-2, M is a number per head, in the delta rule a
matrix. Affine maps compose to an affine map, so a rank computes one for each of its two spans of the sequence, gathers
those of all other ranks, and derives the states before its own spans; no chunk is computed twice. A rank saves the states
before its chunks and the maps, and nothing else of other ranks.

Legend: B batch, n chunks, H heads, N ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.parallel.tensor_parallel import gather_from_sequence_parallel_region


def pass_recurrent_states(
    maps: Tensor, added: Tensor, initial_state: Tensor | None, group: CommGroup
) -> tuple[Tensor, Tensor]:
    """Return the recurrent state before each chunk of this rank, and after the sequence, from chunks' affine maps.
    A chunk maps a state S to M S + Z (`maps` M, `added` Z).

    Args:
        maps: M, [B, n, H] or [B, n, H, K, K].
        added: Z, [B, n, H, K, V].
        initial_state: the state before the first chunk, [B, H, K, V]; None: zero.
        group: the context ranks, each with two spans of the sequence, as in `context_parallel.get_context_rank_chunks`.

    Returns:
        [B, n, H, K, V] and [B, H, K, V].
    """
    maps = maps[..., None, None] if maps.dim() == 3 else maps
    initial_state = torch.zeros_like(added[:, 0]) if initial_state is None else initial_state
    if group.size == 1:
        states = scan_affine_maps(maps, added, initial_state)
        return states[:, :-1], states[:, -1]
    spans, rows = 2, added.shape[0]
    maps, added = (x.reshape(rows * spans, -1, *x.shape[2:]) for x in (maps, added))
    zero = torch.zeros_like(added[:, 0])
    identity = torch.eye(maps.shape[-1], dtype=maps.dtype, device=maps.device).expand_as(maps[:, 0])
    whole = scan_affine_maps(maps, torch.zeros_like(maps), identity)[:, -1], scan_affine_maps(maps, added, zero)[:, -1]
    span_maps, span_added = _gather_spans([torch.unflatten(x, 0, (rows, spans)) for x in whole], group)
    before = scan_affine_maps(span_maps, span_added, initial_state)
    own = before[:, [group.rank, 2 * group.size - 1 - group.rank]].flatten(0, 1)
    states = scan_affine_maps(maps, added, own)[:, :-1]
    return states.reshape(rows, -1, *states.shape[2:]), before[:, -1]


def _gather_spans(parts: Sequence[Tensor], group: CommGroup) -> list[Tensor]:
    """Gather [B, 2, ..] of each rank -> [B, 2 N, ..] in sequence order; the backward reduce-scatters the gradients."""
    gathered = gather_from_sequence_parallel_region(torch.cat([part.flatten(2) for part in parts], -1), group, sp=True)
    ordered = torch.cat([gathered[:, ::2], gathered[:, 1::2].flip(1)], 1)
    split = torch.split(ordered, [part[0, 0].numel() for part in parts], -1)
    return [torch.unflatten(one, -1, part.shape[2:]) for one, part in zip(split, parts, strict=True)]


def scan_affine_maps(maps: Tensor, added: Tensor, initial_state: Tensor) -> Tensor:
    """Return all states S of the recurrence S[0] = initial_state, S[i + 1] = maps[i] S[i] + added[i].

    [B, n, H, K or 1, K or 1], [B, n, H, K, V], [B, H, K, V] -> [B, n + 1, H, K, V].
    """
    states: Tensor = _FoldAffineMaps.apply(maps, added, initial_state)  # type: ignore[no-untyped-call]
    return states


class _FoldAffineMaps(Function):
    """Autograd function of the fold; keeps the states that it returns."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, added: Tensor, initial_state: Tensor) -> Tensor:
        states = added.new_empty(added.shape[0], added.shape[1] + 1, *added.shape[2:])
        states[:, 0] = initial_state
        for i in range(added.shape[1]):
            states[:, i + 1] = _apply_map(maps[:, i], states[:, i]) + added[:, i]
        ctx.save_for_backward(maps, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maps, states = ctx.saved_tensors
        dmaps, dadded = torch.empty_like(maps), torch.empty_like(states[:, 1:])
        ds = gradient[:, -1]
        for i in reversed(range(maps.shape[1])):
            dadded[:, i] = ds
            number = maps.shape[-1] == 1
            dmaps[:, i] = (ds * states[:, i]).sum((-2, -1), keepdim=True) if number else ds @ states[:, i].mT
            ds = _apply_map(maps[:, i].mT, ds) + gradient[:, i]
        return dmaps, dadded, ds


def _apply_map(m: Tensor, state: Tensor) -> Tensor:
    """Return M S, with a number or a matrix M per head."""
    return m * state if m.shape[-1] == 1 else m @ state
