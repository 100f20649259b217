"""Retention (RetNet, arXiv:2307.08621) with short convolutions: linear attention whose state decays by a fixed rate per head.

    S[t] = gamma S[t-1] + v[t] k[t]^T        y[t] = S[t] q[t] / sqrt(K)        gamma = 1 - 2^(-5 - head)
    out(silu(g) norm(y))

q, k and v pass a short convolution (and silu) first, as in later linear-attention models; q and k are not rotated. The
recurrence is Mamba-2's selective scan with a constant step, so it is computed in chunks, by state passing or exchange of heads
between context ranks, and token by token in generation.

Legend: B batch, S sequence, D model width, H heads of a tensor rank, K size of a key, V size of a value, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.extend import (
    Block,
    BlockTraits,
    Extension,
    ForwardContext,
    LayerBuilder,
    ModelConfig,
    Norm,
    RecurrentMixer,
    ScanInputs,
    ScanPass,
    SequenceChunks,
    SplitHeads,
    StrictConfig,
)


class RetentionOptions(StrictConfig):
    """Settings of `model.mixers.retention`."""

    heads: int = Field(4, gt=0)
    key_size: int = Field(32, gt=0, description="K")
    value_size: int = Field(64, gt=0, description="V")
    conv_kernel: int = Field(4, gt=0, description="tokens of the short convolution")
    chunk_size: int = Field(64, gt=0, description="tokens computed at once; the result does not depend on it")


class Retention(nn.Module):
    """Retention layer, heads split over the tensor ranks."""

    def __init__(self, build: LayerBuilder, layer: int, options: RetentionOptions) -> None:
        super().__init__()
        name, heads, tp = f"model.layers.{layer}.retention", options.heads, build.groups.tp
        convolved = [
            SplitHeads("q", heads, options.key_size),
            SplitHeads("k", heads, options.key_size),
            SplitHeads("v", heads, options.value_size),
        ]
        gate = SplitHeads("g", heads, options.value_size)
        blocks = [SplitHeads(f"{name}.{block.name}_proj", block.count, block.size) for block in (*convolved, gate)]
        self.projection = build.build_column_linear(blocks, bias=False)
        self.recurrence = RecurrentMixer(
            build, layer, f"{name}.conv1d", convolved, options.conv_kernel, bias=False, chunk=options.chunk_size,
            heads=convolved[2], state=options.key_size * options.value_size + 1,
        )  # fmt: skip
        self.kernels, self.scale = build.kernels, options.key_size**-0.5
        self.heads = range(tp.rank * heads // tp.size, (tp.rank + 1) * heads // tp.size)  # numbers of this rank's heads
        # partial_grad: the gradient of a tensor rank is only from its own heads, and is summed over the ranks
        weight = build.build_replicated(f"{name}.norm.weight", (options.value_size,), fill=1.0, partial_grad=True)
        self.norm = Norm(build.kernels, weight, None, build.config.norm_eps)
        self.out = build.build_row_linear(f"{name}.o_proj", heads * options.value_size, bias=False)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the same shape; S/T under sequence parallelism."""
        projected, width = self.projection(x, context.dropout), self.recurrence.convolved_channels
        conv_input, gate = torch.tensor_split(projected, [width], -1)
        y = self.norm(self.recurrence(self.retain, conv_input, (), context).to(x.dtype)).flatten(-2)
        out: Tensor = self.out(F.silu(gate) * y, context.dropout)
        return out

    def retain(
        self, parts: Sequence[Tensor], steps: Sequence[Tensor], heads: slice, chunks: SequenceChunks, states: ScanPass
    ) -> Tensor:
        """Return y [B, S, H, V] of some of this rank's heads, from q, k [B, S, H, K] and v [B, S, H, V]."""
        q, k, v = parts
        wide = torch.promote_types(v.dtype, torch.float32)
        numbers = torch.tensor(self.heads[heads], dtype=wide, device=v.device)
        decay = torch.log1p(-torch.exp2(-5 - numbers))
        inputs = ScanInputs(v, torch.ones(v.shape[:-1], dtype=wide, device=v.device), decay, k, q * self.scale)
        return self.kernels.selective_scan(inputs, chunks, states)


def declare(model: ModelConfig, options: RetentionOptions) -> BlockTraits:
    """Return what the trainer may assume: heads, a state, and its exchange between context ranks."""
    heads, key, value = options.heads, options.key_size, options.value_size
    return BlockTraits(
        heads=heads, recurrent=True, context_parallel=True, flops_per_key=2 * heads * (key + value),
        flops_per_token=4 * heads * key * value, keys=options.chunk_size,
    )  # fmt: skip


EXTENSION = Extension(
    name="retention", version="1.0", api=1, mixers={"retention": Block(Retention, RetentionOptions, declare)}
)
