"""A decoder whose head [1, D] gives each token a score, that of what stands up to it: a reward model.

Legend: B batch, S sequence, D model width, T tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mega_trainer.batch import MicroBatch
from mega_trainer.comm import all_gather
from mega_trainer.kernels.fused import wide
from mega_trainer.model.context import Context
from mega_trainer.model.decoder import Decoder
from mega_trainer.parallel.tensor import sequence_part


class RewardModel(Decoder):
    """In place of log-probabilities an objective is given the scores, minus which its tokens' losses are."""

    def objective(
        self, x: Tensor, batch: MicroBatch, context: Context, borrowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Decoder.objective`, from the residual stream [B, S or S/T, D]; without a `weigh` nothing is made small."""
        own = wide(nn.functional.linear(self.head.norm(x), self.head_weight)).squeeze(-1)
        scores = all_gather(own.detach(), self.groups.tp, 1) if self.sp else own.detach()
        weights = torch.zeros_like(scores) if batch.weigh is None else batch.weigh(scores)
        # the head is whole on every tensor rank: each makes the gradient of its part of the sequence, or all of it
        total = -(own * weights[:, sequence_part(scores.shape[1], self.groups.tp, sp=self.sp)]).sum()
        return total, torch.stack([total.detach(), total.new_zeros(())]), -scores

    def logits(self, x: Tensor) -> Tensor:
        """Scores [B, S, 1] of the residual stream."""
        own = wide(nn.functional.linear(self.head.norm(x), self.head_weight))
        return all_gather(own, self.groups.tp, 1) if self.sp else own
