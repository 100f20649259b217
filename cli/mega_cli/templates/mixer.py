"""Token mixer `my_extension`: causal attention whose heads have a learned temperature. Change it to yours.
A recurrent one is written with `RecurrentMixer`: docs/extensions.md of mega has an example.

    y = softmax(exp(temperature) q k^T / sqrt(d)) v

Legend: B batch, S sequence, D model width, H heads of a tensor rank, d head size, T tensor ranks.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn

from mega_trainer.extend import (
    AttentionCore,
    Block,
    BlockTraits,
    Extension,
    ForwardContext,
    LayerBuilder,
    ModelConfig,
    SplitHeads,
    StrictConfig,
)


class TemperatureOptions(StrictConfig):
    """Settings of `model.mixers.my_extension` in run.yaml."""

    temperature: float = Field(0.0, description="initial logarithm of the factor on the scores")


class TemperatureAttention(nn.Module):
    """Causal attention with a learned temperature per head, its heads split over the tensor ranks."""

    def __init__(self, build: LayerBuilder, layer: int, options: TemperatureOptions) -> None:
        super().__init__()
        heads, self.size = build.config.num_attention_heads, build.config.query_key_head_dim
        name = f"model.layers.{layer}.my_extension"  # tensors of a layer begin with model.layers.N.
        blocks = [SplitHeads(f"{name}.{part}_proj", heads, self.size) for part in "qkv"]
        self.qkv = build.build_column_linear(blocks, bias=False)
        self.temperature = build.build_head_parameters(
            [SplitHeads(f"{name}.temperature", heads)], fill=options.temperature
        )[0]
        self.core = AttentionCore(build, layer)
        self.out = build.build_row_linear(f"{name}.o_proj", heads * self.size, bias=False)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the same shape; S/T under sequence parallelism."""
        q, k, v = torch.unflatten(self.qkv(x), -1, (3, -1, self.size)).unbind(-3)  # [B, S, H, d] each
        if (rotation := context.rotation_for_window(self.core.window)) is not None:
            q, k = (self.core.kernels.apply_rotary(part, rotation) for part in (q, k))
        y = self.core(q * self.temperature.exp().to(q.dtype)[:, None], k, v, context)
        out: Tensor = self.out(y.flatten(-2))
        return out


def declare_traits(model: ModelConfig, options: TemperatureOptions) -> BlockTraits:
    """Return what the trainer may assume: tensor ranks divide the heads, context parallelism works, and the FLOPs."""
    heads, size = model.num_attention_heads, model.query_key_head_dim
    return BlockTraits(heads=heads, context_parallel=True, flops_per_key=2 * heads * 2 * size)


EXTENSION = Extension(
    name="my-extension",
    version="0.1",
    api=1,
    mixers={"my_extension": Block(TemperatureAttention, TemperatureOptions, declare_traits)},
)
