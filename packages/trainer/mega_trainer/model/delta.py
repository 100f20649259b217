"""A gated delta net (arXiv:2412.06464) in transformers' and Megatron's conventions, heads split over the tensor ranks.

    q, k, v, z, b, a = projections of the stream            q, k, v = silu(short convolution)
    g = -exp(A) softplus(a + bias), beta = sigmoid(b)       y = delta rule (q, k, v, g, beta)
    out(norm(y) silu(z))                                    the norm over each value head, by one weight

A key head serves several value heads; with fewer key heads than tensor ranks the ranks of a key head hold the same one.

Legend: B batch, S sequence, T tensor ranks, D model width, G this rank's key heads of K channels, H its value heads of V channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.kernels.chunks import Chunks
from mega_trainer.kernels.delta_rule import Pass, Updates
from mega_trainer.kernels.fused import wide
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.norms import Norm
from mega_trainer.model.recurrence import Recurrence
from mega_trainer.parallel.param import Uniform
from mega_trainer.parallel.tensor import Heads


class GatedDelta(nn.Module):
    """Projections, convolution, delta rule, gated norm, output projection."""

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        build = build.unrounded
        delta, tp, name = build.config.delta, build.groups.tp, f"model.layers.{layer}.linear_attn"
        assert delta is not None
        keys = partial(Heads, count=delta.num_key_heads, size=delta.key_head_dim)
        values = partial(Heads, count=delta.num_value_heads, size=delta.value_head_dim)
        each = partial(Heads, count=delta.num_value_heads)
        seen = [keys("q"), keys("k"), values("v")]
        blocks = [
            Heads(f"{name}.in_proj.{block.name}", block.count, block.size)
            for block in (*seen, values("z"), each("b"), each("a"))
        ]
        self.kernels, self.projection = build.kernels, build.column(blocks, bias=False)
        self.recurrence = Recurrence(
            build, layer, f"{name}.conv1d", seen, delta.conv_kernel, bias=False, chunk=delta.chunk_size, heads=values("v"),
            state=delta.key_head_dim * (delta.key_head_dim + delta.value_head_dim),
        )  # fmt: skip
        heads = delta.num_value_heads // tp.size
        self.widths = [self.recurrence.channels, heads * delta.value_head_dim, heads, heads]
        self.a_log = build.heads([each(f"{name}.A_log")], uniform=Uniform(0.01, 16, torch.log))[0]
        self.dt_bias = build.heads([each(f"{name}.dt_bias")], fill=1.0)[0]
        # a rank sees only its own heads, so the gradient is partial
        weight = build.replicated(f"{name}.norm.weight", (delta.value_head_dim,), fill=1.0, partial_grad=True)
        self.norm = Norm(build.kernels, weight, None, delta.norm_eps or build.config.norm_eps)
        self.out = build.row(f"{name}.out_proj", delta.num_value_heads * delta.value_head_dim, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, S or S/T, D] -> the same shape."""
        seen, z, b, a = torch.split(self.projection(x), self.widths, -1)
        normed = self.norm(self.recurrence(self._rule, seen, (b, a), context)).flatten(-2)
        out: Tensor = self.out((wide(normed) * F.silu(wide(z))).to(z.dtype))
        return out

    def _rule(
        self, parts: Sequence[Tensor], steps: Sequence[Tensor], heads: slice, chunks: Chunks, states: Pass
    ) -> Tensor:
        """The delta rule of some value heads, of q, k, v and of their b and a [B, S, H]: [B, S, H, V]."""
        q, k, v = parts
        b, a = (wide(step) for step in steps)
        g = -wide(self.a_log[heads]).exp() * F.softplus(a + wide(self.dt_bias[heads]))
        return self.kernels.delta_rule(Updates(q, k, v, g, b.sigmoid()), chunks, states)
