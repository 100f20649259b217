"""Mamba-2 (arXiv:2405.21060) in Megatron's and transformers' conventions, heads split over the tensor ranks.

    z, dt, x, B, C = projections of the stream          x, B, C = silu(short convolution)
    d = softplus(dt + bias), within limits              S[t] = exp(d A) S[t-1] + d x B^T,  y = S C + D x
    out(norm(y silu(z)))                                the norm over the channels of each group

A group's B and C serve several heads; with fewer groups than tensor ranks the ranks of a group hold the same of them, and
make the mean of its norm together. Context ranks pass each other states, or exchange tokens for heads: what is less.

Legend: B batch, S sequence, N context ranks, s = S/N tokens of a rank, D model width, H this rank's heads of P channels, G its
groups, K size of a state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.kernels.chunks import Chunks
from mega_trainer.kernels.fused import wide
from mega_trainer.kernels.scan import Pass, Steps
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.recurrence import Recurrence
from mega_trainer.parallel.param import Uniform
from mega_trainer.parallel.tensor import Heads, sum_gradient, sum_over


class Mamba(nn.Module):
    """Projections, convolution, scan, gated norm, output projection."""

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        build = build.unrounded
        mamba, tp, name = build.config.mamba, build.groups.tp, f"model.layers.{layer}.mamba"
        assert mamba is not None
        self.kernels, self.mamba, heads = build.kernels, mamba, mamba.num_heads // tp.size
        channels, state = partial(Heads, count=mamba.num_heads, size=mamba.head_dim), mamba.state_size
        seen = [channels("x"), *(Heads(part, mamba.num_groups, state) for part in "BC")]
        blocks = [channels("z"), Heads("dt", mamba.num_heads), *seen]
        self.projection = build.column(
            [Heads(f"{name}.in_proj.{block.name}", block.count, block.size) for block in blocks], bias=mamba.bias
        )
        self.recurrence = Recurrence(
            build, layer, f"{name}.conv1d", seen, mamba.conv_kernel, bias=mamba.conv_bias, chunk=mamba.chunk_size,
            heads=channels("x"), state=mamba.head_dim * state + 1,
        )  # fmt: skip
        self.widths = [heads * mamba.head_dim, heads, self.recurrence.channels]
        low, high = map(math.log, mamba.dt_init)
        each = partial(Heads, count=mamba.num_heads)
        self.dt_bias = build.heads([each(f"{name}.dt_bias")], uniform=Uniform(low, high, self._start_of_bias))[0]
        self.a_log = build.heads([each(f"{name}.A_log")], uniform=Uniform(1, 16, torch.log))[0]
        self.skip = build.heads([each(f"{name}.D")], fill=1.0)[0]
        self.norm = GatedNorm(build, f"{name}.norm.weight")
        self.out = build.row(f"{name}.out_proj", mamba.inner_size, bias=mamba.bias)

    def _start_of_bias(self, logarithms: Tensor) -> Tensor:
        """The inverse softplus of steps whose logarithms these are."""
        steps = logarithms.exp().clamp(min=self.mamba.dt_init_floor)
        return steps + torch.log(-torch.expm1(-steps))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, S or S/T, D] -> the same shape."""
        z, dt, seen = torch.split(self.projection(x), self.widths, -1)
        y = self.recurrence(self._scanned, seen, (dt,), context)
        out: Tensor = self.out(self.norm(y.flatten(-2), z))
        return out

    def _scanned(
        self, parts: Sequence[Tensor], steps: Sequence[Tensor], heads: slice, chunks: Chunks, states: Pass
    ) -> Tensor:
        """S C + D x of some heads [B, S, H, P], of x, B, C and of their dt [B, S, H]."""
        x, b, c = parts
        d = F.softplus(wide(steps[0]) + wide(self.dt_bias[heads])).clamp(*self.mamba.dt_limit)
        y = self.kernels.scan(Steps(x, d, -wide(self.a_log[heads]).exp(), b, c), chunks, states)
        return y + wide(x) * wide(self.skip[heads]).unsqueeze(-1)


class GatedNorm(nn.Module):
    """RMSNorm of y silu(z) over the channels of each group, those of all ranks that share one."""

    def __init__(self, build: Builder, name: str) -> None:
        super().__init__()
        mamba, tp = build.config.mamba, build.groups.tp
        assert mamba is not None
        self.eps = mamba.norm_eps or build.config.norm_eps
        self.groups, self.sharing = max(1, mamba.num_groups // tp.size), build.groups.sharing(mamba.num_groups)
        self.weight = build.heads([Heads(name, mamba.num_heads, mamba.head_dim)], fill=1.0)[0]

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """[B, S, H P] both -> the same shape, in the dtype of z; statistics in at least fp32."""
        gated = torch.unflatten(wide(y) * F.silu(wide(z)), -1, (self.groups, -1))
        mean = gated.square().mean(-1, keepdim=True) / self.sharing.size
        mean = sum_gradient(sum_over(mean, self.sharing, sp=False), self.sharing)
        return ((gated * torch.rsqrt(mean + self.eps)).flatten(-2) * wide(self.weight)).to(z.dtype)
