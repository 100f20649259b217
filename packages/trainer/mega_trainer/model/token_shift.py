"""Token shift (RWKV, arXiv:2305.13048): the vector of the token before, over documents, parallel ranks and generation.

Legend: B batch, S tokens of the sequences, N context ranks, T tensor ranks, c channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.context_parallel import get_context_rank_chunks
from mega_trainer.parallel.parallel_linear import ALONE
from mega_trainer.parallel.tensor_parallel import gather_from_sequence_parallel_region, local_sequence_slice


class TokenShift(nn.Module):
    """Shift of a sequence by one token: each token gets the vector of the one before, zeros at a document's start.

    A block that has one declares `recurrent`; it may declare `context_parallel`.

    Args:
        build, layer: builder of the model, and number of the layer.
        name: name of the shift, different for each one of a layer.
    """

    def __init__(self, build: LayerBuilder, layer: int, name: str) -> None:
        super().__init__()
        self.cp, self.tp, self.layer, self.name = build.groups.cp, build.groups.tp, layer, f"shift.{name}"

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the vector of the token before each token of x [B, S/N or S/N/T, c], zeros at a document's start.

        x is the residual stream, of which tensor ranks have parts under sequence parallelism, or has all tokens of this context
        rank, as the output of a column-parallel layer has.
        """
        if context.cache is not None:
            return context.cache.update_and_recur(self.layer, x, _continue_cached, self.name)
        mask = context.attention_mask
        assert isinstance(mask, SequenceMask)
        tp = self.tp if x.shape[1] * self.cp.size < mask.length else ALONE
        preceding = mask.count_preceding_tokens(self.cp)
        if self.cp.size == tp.size == 1:
            before = F.pad(x[:, :-1], (0, 0, 1, 0))
        else:
            before = shift_between_ranks(x, self.cp, tp)
        if preceding is None:
            return before
        own = preceding[:, local_sequence_slice(preceding.shape[1], tp, sp=tp.size > 1)]
        return before.masked_fill((own == 0).unsqueeze(-1), 0)


def shift_between_ranks(x: Tensor, cp: CommGroup, tp: CommGroup) -> Tensor:
    """Return the vector before each token of x [B, n, c], zeros at the start; sequences are split over `cp`, then `tp`.

    Only the last tokens of both halves of each rank's part are gathered, as a part has at most one gap, which is in its
    middle. The backward sums their gradients.
    """
    n = x.shape[1]
    bounds = sorted({0, n // 2, n})
    last = torch.stack([x[:, stop - 1] for stop in bounds[1:]], 1)
    ends = gather_from_sequence_parallel_region(gather_from_sequence_parallel_region(last, tp, sp=True), cp, sp=True)
    parts = [part[first:][:n] for part in _list_rank_tokens(n, cp, tp) for first in range(0, len(part), n)]
    held = [part[stop - 1] for part in parts for stop in bounds[1:]]  # tokens of `ends`
    own = parts[cp.rank * tp.size + tp.rank]
    shifted = []
    for start, stop in pairwise(bounds):
        first = ends[:, held.index(own[start] - 1)] if own[start] else torch.zeros_like(x[:, 0])
        shifted += [first.unsqueeze(1), x[:, start : stop - 1]]
    return torch.cat(shifted, 1)


def _list_rank_tokens(n: int, cp: CommGroup, tp: CommGroup) -> list[list[int]]:
    """Return the indices of each context rank's tokens in the sequence, of which each tensor rank has n in turn."""
    length = n * tp.size * cp.size
    if cp.size == 1:
        return [list(range(length))]
    chunks = [get_context_rank_chunks(rank, length, cp.size) for rank in range(cp.size)]
    return [[*first, *second] for first, second in chunks]


def _continue_cached(x: Tensor, state: Sequence[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
    """Shift the next tokens of cached sequences; the state is the last token. See `RecurrenceFunction`."""
    (last,) = state or (torch.zeros_like(x[:, :1]),)
    joined = torch.cat([last, x], 1)
    return joined[:, :-1], (joined[:, -1:],)
