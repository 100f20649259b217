"""Gated short convolution of LFM2 (arXiv:2511.23404), channels split over the tensor ranks.

    b, c, x = projections of the stream            out(c * conv(b * x))

Legend: B batch, S sequence, N context ranks, s = S/N tokens of a rank, T tensor ranks, D model width, k taps.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.recurrent_mixer import ShortConvolution
from mega_trainer.parallel.tensor_parallel import SplitHeads


class GatedConvolution(nn.Module):
    """Gated short convolution, a token mixer with two multiplicative gates around a causal depthwise convolution.
    An output projection follows.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        conv, width, name = build.config.conv, build.config.hidden_size, f"model.layers.{layer}.short_conv"
        assert conv is not None
        blocks = [SplitHeads(f"{name}.in_proj.{part}", width) for part in "bcx"]
        self.layer, self.saved = layer, build.saved
        self.projection = build.build_column_linear(blocks, bias=conv.bias)
        self.conv = ShortConvolution(
            build, f"{name}.conv1d", [SplitHeads("x", width)], conv.kernel, bias=conv.bias, silu=False
        )
        self.out = build.build_row_linear(f"{name}.out_proj", width, bias=conv.bias)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, s or s/T, D] to the output of the gated convolution, of an equal shape.
        Each of T tensor-parallel ranks has s/T tokens under sequence parallelism."""
        b, c, x = self.projection(x).chunk(3, -1)
        if context.cache is None:
            y = self.saved.checkpoint_module("attention", self._convolve, b, c, x, context)
        else:
            y = c * context.cache.update_and_recur(self.layer, b * x, self._continue_cached)
        out: Tensor = self.out(y)
        return out

    def _convolve(self, b: Tensor, c: Tensor, x: Tensor, context: ForwardContext) -> Tensor:
        y: Tensor = c * self.conv(b * x, context)
        return y

    def _continue_cached(self, x: Tensor, state: Sequence[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
        """Continue cached sequences from the k - 1 tokens before them; see `RecurrenceFunction`."""
        (tail,) = state or (x.new_zeros(len(x), self.conv.taps - 1, x.shape[-1]),)
        y, tail = self.conv.convolve_step(x, tail)
        return y, (tail,)
