"""What an encoder has behind its layers: it guesses masked tokens, and tells the order of two segments (BERT, arXiv:1810.04805).

Up to the output matrix all works on this rank's part of the sequence: under sequence parallelism the gradients are sums
over the tensor ranks, else each of these has the whole.

Legend: B batch, S sequence, D model width, T tensor-parallel ranks.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.batch import Pairs
from mega_trainer.kernels.fused import wide
from mega_trainer.model.builder import Builder


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
