"""Differential attention (arXiv:2410.05258): the difference of two softmax attention maps cancels common noise.

    y = (1 - init) norm( softmax(q1 k1) v - lambda softmax(q2 k2) v )
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + init        init = 0.8 - 0.6 exp(-0.3 layer)

A head has two queries and two keys of d elements and a value of 2 d. There are half as many heads as in ordinary attention,
with as many parameters.

Legend: B batch, S sequence, H heads of a tensor rank, d size of a query, T tensor ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mega_trainer.extend import (
    AttentionCore,
    Block,
    BlockTraits,
    Extension,
    ForwardContext,
    LayerBuilder,
    ModelConfig,
    Norm,
    SplitHeads,
    StrictConfig,
)


class DifferentialOptions(StrictConfig):
    """Settings of `model.mixers.differential`."""

    lambda_init: float | None = None  # default: by the layer's number, as in the paper


class DifferentialAttention(nn.Module):
    """Differential attention layer, heads split over the tensor ranks."""

    def __init__(self, build: LayerBuilder, layer: int, options: DifferentialOptions) -> None:
        super().__init__()
        config, name = build.config, f"model.layers.{layer}.self_attn"
        heads, self.size = config.num_attention_heads // 2, config.query_key_head_dim
        default = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lambda_init = default if options.lambda_init is None else options.lambda_init
        blocks = [SplitHeads(f"{name}.{part}_proj", heads, 2 * self.size) for part in "qkv"]
        self.qkv = build.build_column_linear(blocks, bias=False)
        self.core = AttentionCore(build, layer)
        # partial_grad: the gradient of a tensor rank is only from its own heads, and is summed over the ranks
        vectors = [f"{name}.lambda_{part}" for part in ("q1", "k1", "q2", "k2")]
        self.lambdas = nn.ParameterList(
            build.build_replicated(vector, (self.size,), std=0.1, partial_grad=True) for vector in vectors
        )
        weight = build.build_replicated(f"{name}.norm.weight", (2 * self.size,), fill=1.0, partial_grad=True)
        self.norm = Norm(build.kernels, weight, None, config.norm_eps)
        self.out = build.build_row_linear(f"{name}.o_proj", heads * 2 * self.size, bias=False)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the same shape; S/T under sequence parallelism."""
        q, k, v = torch.unflatten(self.qkv(x, context.dropout), -1, (3, -1)).unbind(-2)
        q, k = (torch.unflatten(part, -1, (-1, self.size)) for part in (q, k))  # [B, S, 2 H, d]
        v = torch.unflatten(v, -1, (-1, 2 * self.size)).repeat_interleave(2, -2)  # [B, S, 2 H, 2 d]
        if (rotation := context.rotation_for_window(self.core.window)) is not None:
            q, k = (self.core.kernels.apply_rotary(part, rotation) for part in (q, k))
        first, second = torch.unflatten(self.core(q, k, v, context), -2, (-1, 2)).unbind(-2)  # [B, S, H, 2 d]
        q1, k1, q2, k2 = self.lambdas
        weight = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.lambda_init
        y = self.norm(first - weight * second) * (1 - self.lambda_init)
        out: Tensor = self.out(y.flatten(-2), context.dropout)
        return out


def declare(model: ModelConfig, options: DifferentialOptions) -> BlockTraits:
    """Return what the trainer may assume: heads that tensor ranks split, and attention that context ranks exchange."""
    heads, size = model.num_attention_heads // 2, model.query_key_head_dim
    return BlockTraits(heads=heads, context_parallel=True, flops_per_key=2 * 2 * heads * (size + 2 * size))


EXTENSION = Extension(
    name="differential-attention",
    version="1.0",
    api=1,
    mixers={"differential": Block(DifferentialAttention, DifferentialOptions, declare)},
)
