"""Hybrid mixer of Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side in a layer, and the factors of its layers.

    y = a' attention(a x) + m' mamba(m x)

Keys, the five parts of Mamba-2's projection, the MLP's gate and its output have factors, too. They come from muP: a width's
factors stay in the model, so that its weights train with the learning rate of another width.

Legend: B batch, S sequence, T tensor-parallel ranks, D model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mega_trainer.model.feed_forward import FeedForward
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder, LayerFactory
from mega_trainer.model.mamba import MambaMixer


class HybridMixer(nn.Module):
    """Attention and Mamba-2 of the same input, with factors on inputs and outputs, which are added.

    Args:
        build, layer: builder of the model, and number of the layer.
        attention: constructor of attention.
    """

    def __init__(self, build: LayerBuilder, layer: int, attention: LayerFactory) -> None:
        super().__init__()
        config, hybrid = build.config, build.config.hybrid
        assert hybrid is not None
        self.hybrid = hybrid
        scale = (config.attention_scale or config.query_key_head_dim**-0.5) * hybrid.keys  # rotation is linear
        scaled = replace(build, config=config.model_copy(update={"attention_scale": scale}))
        self.attention = attention(scaled if hybrid.keys != 1 else build, layer)
        self.mamba = MambaMixer(build, layer)
        z, dt, _ = self.mamba.widths
        recurrence = self.mamba.recurrence
        widths = [z, *(count * size for count, size in zip(recurrence.counts, recurrence.sizes, strict=True)), dt]
        rows = list(zip(widths, hybrid.mamba_projections, strict=True))
        if set(hybrid.mamba_projections) != {1.0}:  # in the order of the rows: z, dt, x, B, C
            scaled_rows = ScaledProjection(self.mamba.projection, [rows[0], rows[-1], *rows[1:-1]])
            self.mamba.projection = scaled_rows  # type: ignore[assignment]

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the sum of the outputs, of an equal shape.
        S/T is the length under sequence parallelism.
        """
        hybrid = self.hybrid
        attended: Tensor = self.attention(_scale(x, hybrid.attention_input), context)
        scanned: Tensor = self.mamba(_scale(x, hybrid.mamba_input), context)
        return _scale(attended, hybrid.attention_output) + _scale(scanned, hybrid.mamba_output)


class ScaledProjection(nn.Module):
    """Projection whose output channels are multiplied by constants, one for each range of channels.
    `factors` are (channels of this rank, factor), in the order of the channels.
    """

    def __init__(self, linear: nn.Module, factors: Sequence[tuple[int, float]]) -> None:
        super().__init__()
        self.linear, self.factors = linear, factors

    def forward(self, *given: object) -> Tensor:
        """Return the scaled output of the projection, which has the same arguments."""
        y: Tensor = self.linear(*given)
        return y * torch.cat([y.new_full((width,), factor) for width, factor in self.factors])


class ScaledFeedForward(nn.Module):
    """Gated feed-forward block with factors on its gate before the activation, and on its output."""

    def __init__(self, build: LayerBuilder, name: str, width: int) -> None:
        super().__init__()
        assert build.config.mlp_multipliers is not None
        gate, self.factor = build.config.mlp_multipliers
        self.block, own = FeedForward(build, name, width), width // build.groups.tp.size
        self.block.up = ScaledProjection(self.block.up, [(own, gate), (own, 1.0)])  # type: ignore[assignment]

    def forward(self, x: Tensor, context: ForwardContext | None = None) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the block's output of an equal shape."""
        y: Tensor = self.block(x, context)
        return _scale(y, self.factor)


def _scale(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
