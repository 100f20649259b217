"""The short causal convolution of recurrent mixers (arXiv:2312.00752), its channels split over the tensor ranks.

Legend: B batch, S sequence, N context ranks, s = S/N tokens of a rank, c channels of a rank, k taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mega_trainer.comm import Group
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context, Sequences
from mega_trainer.parallel.context import tokens_before
from mega_trainer.parallel.param import Uniform
from mega_trainer.parallel.tensor import Heads, joined


class ShortConv(nn.Module):
    """silu(b + sum over the last k tokens of a channel, weighed), no token of another document among them.

    Args:
        build: of the model.
        name: of its tensors, `{name}.{block}.weight` [channels, k] and `.bias` [channels].
        blocks: the channels, in their order, each block split by its heads, or shared where there are fewer than ranks.
        taps: k.
        bias: whether there is one.
    """

    def __init__(self, build: Builder, name: str, blocks: Sequence[Heads], taps: int, *, bias: bool) -> None:
        super().__init__()
        self.cp, self.kernels, self.taps = build.groups.cp, build.kernels, taps
        start = Uniform(-(taps**-0.5), taps**-0.5)
        self.weights, self.biases = (
            nn.ParameterList(
                build.heads(
                    [Heads(f"{name}.{block.name}.{which}", block.count, block.size) for block in blocks],
                    tail,
                    uniform=start,
                )
                if there
                else []
            )
            for which, tail, there in (("weight", (taps,), True), ("bias", (), bias))
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """This rank's tokens and channels [B, s, c] -> the same shape; the tokens before its chunks come from other ranks."""
        assert isinstance(context.sight, Sequences)
        reach = context.sight.reach(self.cp)
        if self.cp.size == 1:
            return self._convolved(x, None, reach)
        before = tokens_before(x, self.taps - 1, self.cp).flatten(0, 1)
        chunks = torch.unflatten(x, 1, (2, -1)).flatten(0, 1)
        reach = None if reach is None else torch.unflatten(reach, 1, (2, -1)).flatten(0, 1)
        return self._convolved(chunks, before, reach).view_as(x)

    def of_sequences(self, x: Tensor, context: Context, channels: Tensor) -> Tensor:
        """Some `channels` int64 [c'] of this rank's, of all tokens: [B, S, c'] -> the same shape."""
        assert isinstance(context.sight, Sequences)
        weight, bias = joined(self.weights), joined(self.biases)
        assert weight is not None
        reach = context.sight.reach(Group("alone"))
        return self.kernels.short_conv(x, None, weight[channels], None if bias is None else bias[channels], reach)

    def step(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """The next tokens [B, S, c] of one document each, behind the k - 1 before them, zeros at first: the result, and the
        tokens before the next ones.
        """
        return self._convolved(x, tail, None), torch.cat([tail, x], 1)[:, x.shape[1] :]

    def _convolved(self, x: Tensor, before: Tensor | None, reach: Tensor | None) -> Tensor:
        weight = joined(self.weights)
        assert weight is not None
        return self.kernels.short_conv(x, before, weight, joined(self.biases), reach)
