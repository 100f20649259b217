"""A student against what a teacher makes of each token: the loss of one, and the likeliest tokens of the other.

The loss of a token is t^2 KL(teacher || student), both at temperature t (Hinton et al. 2015, arXiv:1503.02531), the teacher's
distribution being that of its K likeliest tokens, made to sum to one.

Legend: N or n tokens, D model width, V vocabulary, R rows of the head on each rank, K tokens of the teacher's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mega_trainer.batch import SoftLabels
from mega_trainer.comm import Group, all_gather
from mega_trainer.model.loss import Kept, capped, chunk_of, logits_of, over_ranks, place_of, slope


class AgainstTeacher:
    """`Labels` (`model.loss`) that are a teacher's."""

    def __init__(self, soft: SoftLabels, rows: int, group: Group, softcap: float | None) -> None:
        self.here, self.target = place_of(soft.ids.flatten(0, 1), rows, group)
        self.log_shares = (soft.log_probs.flatten(0, 1) / soft.temperature).log_softmax(-1)
        self.group, self.softcap, self.temperature = group, softcap, soft.temperature

    def losses(self, logits: Tensor, part: slice) -> tuple[Kept, Tensor]:
        """See `Labels`."""
        scaled, told = capped(logits, self.softcap) / self.temperature, self.log_shares[part]
        shares = told.exp()
        held = torch.where(self.here[part], scaled.gather(1, self.target[part]), 0.0)
        lse, mean = over_ranks(scaled.logsumexp(-1), (shares * held).sum(-1), self.group)
        return (lse,), self.temperature**2 * ((shares * told).sum(-1) - mean + lse)

    def turn(self, logits: Tensor, kept: Kept, weights: Tensor, part: slice) -> None:
        """See `Labels`: t (student - teacher)."""
        (lse,) = kept
        out = (capped(logits, self.softcap) / self.temperature - lse[:, None]).exp_()
        shares = torch.where(self.here[part], self.log_shares[part].exp(), 0.0)
        out.scatter_add_(1, self.target[part], -shares.to(out.dtype))
        out.mul_(self.temperature * weights.to(out.dtype)[:, None])
        logits.copy_(out if self.softcap is None else out.mul_(slope(logits, self.softcap)))


@torch.no_grad()
def likeliest(
    hidden: Tensor, head: Tensor, bias: Tensor | None, group: Group, vocab_size: int, softcap: float | None, count: int
) -> tuple[Tensor, Tensor]:
    """The likeliest next tokens, the first of them first: ids int64 [N, K], and log-probabilities [N, K] in at least fp32.

    Args:
        hidden: [N, D]; the same on every rank of `group`.
        head, bias, group, vocab_size, softcap: as in `head_loss`.
        count: K.
    """
    rows = head.shape[0]
    found = []
    for chunk in torch.split(hidden, chunk_of(hidden, rows)):
        logits = capped(logits_of(chunk, head, bias, group, vocab_size), softcap)
        lse, _ = over_ranks(logits.logsumexp(-1), torch.zeros_like(logits[:, 0]), group)
        values, ids = logits.topk(min(count, rows))
        values, ids = (all_gather(each.contiguous(), group, -1) for each in (values, ids + group.rank * rows))
        top = values.topk(count)
        found.append((ids.gather(1, top.indices), top.values - lse[:, None]))
    ids, log_probs = (torch.cat(each) for each in zip(*found, strict=True))
    return ids, log_probs
