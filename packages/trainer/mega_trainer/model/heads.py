"""What is behind a model's layers; an encoder's guesses masked tokens, and tells the order of two segments (BERT).

Up to the output matrix all works on this rank's part of the sequence: under sequence parallelism the gradients are sums
over the tensor ranks, else each of these has the whole.

Legend: B batch, S sequence, D model width, V vocabulary, T tensor-parallel ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.batch import Pairs, Targets
from mega_trainer.comm import all_gather
from mega_trainer.kernels.fused import wide
from mega_trainer.model.builder import Builder
from mega_trainer.model.distillation import AgainstTeacher
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


class MaskedLmHead(nn.Module):
    """norm(act(W x + b)), which the output matrix then multiplies."""

    def __init__(self, build: Builder) -> None:
        super().__init__()
        config, head = build.config, build.config.masked_lm
        assert head is not None
        self.weight, self.bias = dense(build, "lm_head.dense", config.hidden_size, bias=head.dense_bias)
        self.approximate = "tanh" if head.activation == "gelu_tanh" else "none"
        self.linear, self.norm = build.linear, build.norm("lm_head.norm")

    def forward(self, x: Tensor) -> Tensor:
        """[B, S or S/T, D] -> the same shape."""
        y: Tensor = self.norm(F.gelu(self.linear(x, self.weight, self.bias), approximate=self.approximate))
        return y


class Pooler(nn.Module):
    """tanh(W x + b) of the first token; and of that, if the model has it, whether its segments are swapped."""

    def __init__(self, build: Builder) -> None:
        super().__init__()
        width, groups = build.config.hidden_size, build.groups
        self.weight, self.bias = dense(build, "model.pooler", width, bias=True)
        self.classes: nn.Parameter | None = None
        self.offset: nn.Parameter | None = None
        if build.config.sentence_pairs:
            self.classes, self.offset = dense(build, "pair_head", 2, bias=True)
        self.linear = build.linear
        self.has_first = groups.cp.rank == 0 and (groups.tp.rank == 0 or not build.sp)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S or S/T, D] -> [B, D], on a rank that has the first token."""
        return self.linear(x[:, :1], self.weight, self.bias).tanh()[:, 0]

    def logits(self, x: Tensor) -> Tensor:
        """[B, S or S/T, D] -> [B, 2], of segments in order and swapped."""
        assert self.classes is not None
        return self.linear(self(x), self.classes, self.offset)

    def loss(self, x: Tensor, pairs: Pairs) -> Tensor:
        """The weighted sum of the cross entropies, from the stream [B, S or S/T, D].

        A rank without the first token computes it of another, times zero: all have the same operations and gradients.
        """
        losses = F.cross_entropy(wide(self.logits(x)), pairs.labels, reduction="none")
        return (losses * (pairs.weights if self.has_first else 0 * pairs.weights)).sum()


def dense(build: Builder, name: str, rows: int, *, bias: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A weight [rows, D] and a bias [rows] that every tensor rank holds whole."""
    config = build.config
    weight = build.replicated(f"{name}.weight", (rows, config.hidden_size), std=config.init_std)
    return weight, build.replicated(f"{name}.bias", (rows,)) if bias else None
