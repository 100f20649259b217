"""A decoder that tells its likeliest next tokens, for a student to learn from.

Legend: B batch, S sequence, D model width, V vocabulary, T tensor-parallel ranks, K tokens that are told.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mega_trainer.batch import MicroBatch
from mega_trainer.model.context import Context
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.distillation import likeliest


class Teacher(Decoder):
    """What would be each token's loss is what the teacher makes of it: [B, S, 2 K], log-probabilities and then ids, which
    fp32 has exactly up to 2^24.

    Attributes:
        count: K.
    """

    count = 1

    def objective(
        self, x: Tensor, batch: MicroBatch, context: Context, borrowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `Decoder.objective`, from the residual stream [B, S or S/T, D]; nothing is made small."""
        hidden, output = self.head.before_output(self.head.norm(x)).flatten(0, 1), self.output(borrowed)
        ids, log_probs = likeliest(
            hidden, *output, self.groups.tp, self.config.vocab_size, self.config.logit_softcap, self.count
        )
        told = torch.cat([log_probs, ids.to(log_probs.dtype)], -1).view(*batch.labels.shape, -1)
        zero = told.new_zeros(())
        return zero, torch.stack([zero, zero]), told
