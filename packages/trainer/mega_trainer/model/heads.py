"""What is behind a model's layers.

Legend: B batch, S sequence, D model width, V vocabulary, T tensor-parallel ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.batch import Targets
from mega_trainer.comm import all_gather
from mega_trainer.model.builder import Builder
from mega_trainer.model.distillation import AgainstTeacher
from mega_trainer.model.encoder_heads import MaskedLmHead, Pooler
from mega_trainer.model.loss import head_loss
from mega_trainer.parallel.tensor import whole_sequence


class Output(NamedTuple):
    """The output matrix [V/T, D], and what is added to the logits, [V/T]."""

    weight: Tensor
    bias: Tensor | None


class Head(nn.Module):
    """The last norm, and what makes logits and losses of it by an output matrix, which may be the embedding's or another stage's."""

    def __init__(self, build: Builder) -> None:
        super().__init__()
        config = build.config
        self.config, self.tp, self.sp, self.leaves = config, build.groups.tp, build.sp, build.leaves
        self.norm = build.norm("model.norm") if config.norm_position != "sum" else nn.Identity()
        self.transform = MaskedLmHead(build) if config.masked_lm else None
        self.pooler = Pooler(build) if config.pooler else None

    def before_output(self, hidden: Tensor) -> Tensor:
        """What has been normed, [B, S or S/T, D], as the output matrix is multiplied with it: [B, S, D].

        `logit_scale` is on this side of it, where it is less to do.
        """
        x = hidden if self.transform is None else self.transform(hidden)
        x = x if self.config.logit_scale == 1 else x * self.config.logit_scale
        return whole_sequence(x, self.tp, sp=self.sp)

    def logits(self, hidden: Tensor, output: Output) -> Tensor:
        """[B, S, V] of what has been normed, whole on every tensor rank. Not for training."""
        local = F.linear(self.before_output(hidden), *output)
        logits, cap = all_gather(local, self.tp, -1)[..., : self.config.vocab_size], self.config.logit_softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def loss(self, hidden: Tensor, output: Output, targets: Targets) -> tuple[Tensor, Tensor]:
        """The weighted sum of the losses, and each token's [B, S], of what has been normed, [B, S or S/T, D]."""
        shape, cap, weigh, soft = targets.labels.shape, self.config.logit_softcap, targets.weigh, targets.soft
        flat = None if weigh is None else (lambda told: weigh(told.view(shape)).flatten())
        against = None if soft is None else AgainstTeacher(soft, output.weight.shape[0], self.tp, cap)
        total, losses = head_loss(
            self.before_output(hidden).flatten(0, 1), output.weight, targets.labels.flatten(), targets.weights.flatten(),
            self.tp, self.config.vocab_size, cap, self.leaves, output.bias, flat, against,
        )  # fmt: skip
        return total, losses.view(shape)
