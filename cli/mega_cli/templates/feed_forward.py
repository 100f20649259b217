"""Feed-forward block `my_extension`: a bilinear layer (arXiv:2002.05202). Change it to yours.

    y = W_down ((W_gate x) * (W_up x))

Legend: B batch, S sequence, D model width, F width of the block, T tensor ranks.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from mega_trainer.extend import (
    Block,
    BlockTraits,
    Extension,
    ForwardContext,
    LayerBuilder,
    ModelConfig,
    SplitHeads,
    StrictConfig,
)


class BilinearOptions(StrictConfig):
    """Settings of `model.feed_forwards.my_extension` in run.yaml."""

    width: int = Field(512, gt=0, description="F")


class BilinearFeedForward(nn.Module):
    """Bilinear feed-forward block, its width split over the tensor ranks."""

    def __init__(self, build: LayerBuilder, layer: int, options: BilinearOptions) -> None:
        super().__init__()
        name = f"model.layers.{layer}.my_extension"  # tensors of a layer begin with model.layers.N.
        blocks = [SplitHeads(f"{name}.{part}_proj", options.width) for part in ("gate", "up")]
        self.up = build.build_column_linear(blocks, bias=False)
        self.down = build.build_row_linear(f"{name}.down_proj", options.width, bias=False)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the same shape; S/T under sequence parallelism."""
        gate, up = self.up(x).chunk(2, -1)  # [B, S, F/T] each
        out: Tensor = self.down(gate * up)
        return out


def declare_traits(model: ModelConfig, options: BilinearOptions) -> BlockTraits:
    """Return what the trainer may assume: tensor ranks divide the width, and each token stands alone."""
    return BlockTraits(heads=options.width, context_parallel=True)


EXTENSION = Extension(
    name="my-extension",
    version="0.1",
    api=1,
    feed_forwards={"my_extension": Block(BilinearFeedForward, BilinearOptions, declare_traits)},
)
