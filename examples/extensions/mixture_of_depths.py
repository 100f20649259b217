"""Mixture of depths (arXiv:2404.02258) with a router that decides for each token alone whether it uses the feed-forward block.

    p = sigmoid(w . x + bias)        y = p mlp(x) where p > threshold, else 0

The paper's router takes the best tokens of a sequence, so that its decision depends on later tokens, and needs a second
predictor for generation. Here the threshold is fixed: training, generation and every parallel layout decide alike. The block
is computed for all tokens; a kernel that leaves out the others would save the rest of the work.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from mega_trainer.extend import (
    Block,
    BlockTraits,
    Extension,
    FeedForward,
    ForwardContext,
    LayerBuilder,
    ModelConfig,
    StrictConfig,
)


class DepthOptions(StrictConfig):
    """Settings of `model.feed_forwards.depths`."""

    width: int | None = Field(None, gt=0, description="width of the block; default: ffn_hidden_size of the model")
    threshold: float = Field(0.5, ge=0, lt=1, description="least probability of a token that uses the block")
    bias: float = Field(
        1.0, description="initial value of the router's bias; above 0 most tokens use the block at first"
    )


class MixtureOfDepths(nn.Module):
    """Feed-forward block that a token skips if its router says so."""

    def __init__(self, build: LayerBuilder, layer: int, options: DepthOptions) -> None:
        super().__init__()
        name, config = f"model.layers.{layer}.mlp", build.config
        self.threshold = options.threshold
        self.block = FeedForward(build, name, options.width or config.ffn_hidden_size)
        # every tensor rank routes the tokens of its residual stream with the whole weights
        self.linear = build.unsharded_linear
        self.weight = build.build_replicated(f"{name}.router.weight", (1, config.hidden_size), std=config.init_std)
        self.bias = build.build_replicated(f"{name}.router.bias", (1,), fill=options.bias)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the same shape; S/T under sequence parallelism."""
        probability = self.linear(x, self.weight, self.bias).sigmoid()
        return self.block(x, context) * probability.where(probability > self.threshold, 0)


def declare(model: ModelConfig, options: DepthOptions) -> BlockTraits:
    """Return what the trainer may assume: the block mixes no tokens and has no heads."""
    return BlockTraits(context_parallel=True)


EXTENSION = Extension(
    name="mixture-of-depths", version="1.0", api=1,
    feed_forwards={"depths": Block(MixtureOfDepths, DepthOptions, declare)},
)  # fmt: skip
