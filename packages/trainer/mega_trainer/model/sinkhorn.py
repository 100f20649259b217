"""A balanced choice of experts in training: Sinkhorn's iteration on the router's logits, as in S-BASE (arXiv:2202.01169).

The positive matrix exp(logits) of a sequence's T tokens and E experts is scaled by rows and columns until each token has
1 / T of it and each expert 1 / E; a token then goes to the experts that have most of its row. Over each sequence by
itself, so that neither micro-batches nor ranks change it; Megatron's, over all tokens that a rank has of a micro-batch,
is the same where these are one sequence.

Legend: B sequences, S positions of each, N tokens of this rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_trainer.comm import Group, all_gather
from mega_trainer.model.routing import Tokens

TOLERANCE = 1e-4  # mean change of the columns' factors in a round, after which it ends
ROUNDS = 100  # and at the latest: far more than it takes, but rounding alone can move a large factor for ever
EPSILON = 1e-8


def balanced(logits: Tensor, tokens: Tokens, groups: Sequence[Group]) -> Tensor:
    """The scaled matrix's rows of this rank's tokens, [N, E], from their logits; zero for tokens that do not matter.

    `groups` share the sequence's tokens: all of these are gathered.
    """
    nowhere = tokens.sequences * tokens.length
    own = torch.where(tokens.matter, tokens.row * tokens.length + tokens.place, nowhere)
    cells = own
    for group in groups:
        logits, cells = all_gather(logits, group), all_gather(cells, group)
    table = logits.new_full((nowhere + 1, logits.shape[-1]), float("-inf"))
    table[cells] = logits
    table[-1] = float("-inf")
    scaled = sinkhorn(table[:-1].view(tokens.sequences, tokens.length, -1)).flatten(0, 1)
    return torch.cat([scaled, scaled.new_zeros(1, scaled.shape[-1])])[own]


def sinkhorn(logits: Tensor) -> Tensor:
    """exp(logits) of each sequence, scaled: [B, S, E] -> [B, S, E]. A row of -inf is no token."""
    top = logits.amax(-1, keepdim=True)
    there = top > float("-inf")
    matrix = (logits - top.masked_fill(~there, 0.0)).exp()  # a factor of a row changes nothing else
    count = there.sum(1).clamp(min=1)
    columns, rows = logits.new_ones(len(logits), logits.shape[-1]), logits.new_ones(logits.shape[:2])
    moving = torch.ones(len(logits), 1, dtype=torch.bool, device=logits.device)
    for _ in range(ROUNDS):
        next_rows = 1 / (count * ((matrix * columns.unsqueeze(1)).sum(-1) + EPSILON))
        next_columns = 1 / (matrix.shape[-1] * ((matrix * next_rows.unsqueeze(-1)).sum(1) + EPSILON))
        change = (next_columns - columns).abs().mean(-1, keepdim=True)
        rows, columns = torch.where(moving, next_rows, rows), torch.where(moving, next_columns, columns)
        moving = moving & (change > TOLERANCE)
        if not moving.any():
            break
    return columns.unsqueeze(1) * matrix * rows.unsqueeze(-1)
