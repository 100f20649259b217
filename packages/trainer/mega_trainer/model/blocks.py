"""Layers that are more than `Block`: with cross attention, or with norms behind the sums."""

from __future__ import annotations

from torch import Tensor, nn

from mega_trainer.model.block import Block, Half
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.cross import CrossAttention


class PostNormBlock(Block):
    """x = norm(x + mixer x), then x = norm(x + feed x), as in the first transformers and BERT (arXiv:1706.03762)."""

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__(build, layer)
        names = (*(["cross_attn"] if build.config.crosses(layer) else []), "post_attention", "post_feedforward")
        self.norms = nn.ModuleList(build.norm(f"model.layers.{layer}.{name}_layernorm") for name in names)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream [B, S or S/T, D], one layer further."""
        halves = [half for half in (self.mixer, self.cross, self.feed) if half is not None]
        for half, norm in zip(halves, self.norms, strict=True):
            x = norm.of_sum(x, half(x, context))[1]  # type: ignore[operator]
        return x


def block_of(build: Builder, layer: int) -> Block:
    """The layer of that number, as the configuration has it."""
    last = build.config.norm_position == "sum"
    block = (PostNormBlock if last else Block)(build, layer)
    if build.config.crosses(layer):
        block.cross = Half(build.of_layer(layer), layer, "cross", CrossAttention, "" if last else "cross_attn", "")
    return block
