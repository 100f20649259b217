"""Models with other outputs than next-token losses: reward and task heads, and the distillation teacher.

A head [K, D] scores each token; an objective selects the tokens that stand for a text.

Legend: B batch, S sequence, D model width, V vocabulary, T tensor-parallel ranks, K top tokens of a teacher.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mega_trainer.data.micro_batch import MicroBatch
from mega_trainer.distributed.comm import all_gather
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.vocab_parallel_loss import topk_log_probs
from mega_trainer.parallel.tensor_parallel import local_sequence_slice


class TaskOutputDecoder(Decoder):
    """Model with outputs per token other than logits of a vocabulary (reward model, task head, embeddings).
    The outputs are K scores of the head (for a reward model K is 1, without its axis), or hidden states as vectors of
    texts (K = D). They replace the log-probabilities in an objective.
    """

    def compute_objective(
        self, x: Tensor, batch: MicroBatch, context: ForwardContext, tied_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss to differentiate, its sums [2], and each token's negated scores, from final hidden states.
        The loss is -sum(scores * weights), by the batch's `weight_fn`, and zero without one. Scores are [B, S] or
        [B, S, K], hidden states [B, S or S/T, D] (S/T under sequence parallelism over T ranks); see
        `Decoder.compute_objective`.
        """
        own = self.score_tokens(x)
        own = own.squeeze(-1) if self.config.score else own
        scores = all_gather(own.detach(), self.groups.tp, 1) if self.sp else own.detach()
        weights = torch.zeros_like(scores) if batch.weight_fn is None else batch.weight_fn(scores)
        # the head is whole on every tensor rank, which computes the gradient of its part of the sequence, or of all of it
        total = -(own * weights[:, local_sequence_slice(scores.shape[1], self.groups.tp, sp=self.sp)]).sum()
        return total, torch.stack([total.detach(), total.new_zeros(())]), -scores

    def score_tokens(self, x: Tensor) -> Tensor:
        """Return the scores of this rank's tokens, or their normalised states if the model has no head.
        They are [B, S or S/T, K].
        """
        hidden = self.head.norm(x)
        if self.head.transform is not None:
            hidden = self.head.transform(hidden)
        if self.head.pooler is not None:
            hidden = self.head.pooler.pool_tokens(hidden)
        if self.matrix is not None:
            hidden = nn.functional.linear(hidden, self.matrix, self.head_bias)
        return upcast_to_fp32(hidden)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return the scores of each token, [B, S, K], from the final hidden states."""
        own = self.score_tokens(x)
        return all_gather(own, self.groups.tp, 1) if self.sp else own


class DistillationTeacher(Decoder):
    """Teacher model for distillation, which returns its K most likely next tokens in place of each token's loss.
    They are [B, S, 2 K], log-probabilities and then ids.

    fp32 represents ids exactly up to 2^24.

    Attributes:
        count: K.
    """

    count = 1

    def compute_objective(
        self, x: Tensor, batch: MicroBatch, context: ForwardContext, tied_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return a zero objective, zero sums, and each token's K likeliest next tokens [B, S, 2 K]: log-probabilities, then ids.
        The hidden states are [B, S or S/T, D] (S/T under sequence parallelism over T ranks); see
        `Decoder.compute_objective`.
        """
        hidden = self.head.prepare_hidden_for_logits(self.head.norm(x)).flatten(0, 1)
        output = self.get_output_projection(tied_weight)
        ids, log_probs = topk_log_probs(
            hidden, *output, self.groups.tp, self.config.vocab_size, self.config.logit_softcap, self.count
        )
        top_k = torch.cat([log_probs, ids.to(log_probs.dtype)], -1).view(*batch.labels.shape, -1)
        zero = top_k.new_zeros(())
        return zero, torch.stack([zero, zero]), top_k
