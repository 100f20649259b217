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

from mega_trainer.comm import Group
from mega_trainer.kernels.chunks import Chunks
from mega_trainer.kernels.fused import wide
from mega_trainer.kernels.scan import Pass, Steps, scan
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context, Sequences
from mega_trainer.model.short_conv import ShortConv
from mega_trainer.parallel.context import AllToAll
from mega_trainer.parallel.param import Uniform
from mega_trainer.parallel.state import pass_states
from mega_trainer.parallel.tensor import Heads, sum_gradient, sum_over

ALONE = Group("alone")


class Mamba(nn.Module):
    """Projections, convolution, scan, gated norm, output projection."""

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        mamba, tp, name = build.config.mamba, build.groups.tp, f"model.layers.{layer}.mamba"
        assert mamba is not None
        self.mamba, self.cp, self.saved, self.exchanges = (
            mamba,
            build.groups.cp,
            build.saved,
            build.cp_kind == "alltoall",
        )
        self.heads, self.groups = mamba.num_heads // tp.size, max(1, mamba.num_groups // tp.size)
        channels, state = partial(Heads, count=mamba.num_heads, size=mamba.head_dim), mamba.state_size
        seen = [channels("x"), *(Heads(part, mamba.num_groups, state) for part in "BC")]
        blocks = [channels("z"), Heads("dt", mamba.num_heads), *seen]
        self.projection = build.column(
            [Heads(f"{name}.in_proj.{block.name}", block.count, block.size) for block in blocks], bias=mamba.bias
        )
        inner = self.heads * mamba.head_dim
        self.widths = [inner, self.heads, inner + 2 * self.groups * state]
        self.conv = ShortConv(build, f"{name}.conv1d", seen, mamba.conv_kernel, bias=mamba.conv_bias)
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
        mix = self._exchanged if self.cp.size > 1 and self._exchange_is_less(seen) else self._passed
        y = self.saved.whole("attention", mix, seen, dt.unsqueeze(-1), context)
        out: Tensor = self.out(self.norm(y.flatten(-2), z))
        return out

    def _exchange_is_less(self, seen: Tensor) -> bool:
        """Whether to exchange heads, where these can be shared: if that is asked for, or fewer bytes than of states."""
        size, heads, groups = self.cp.size, self.heads, self.groups
        if self.exchanges:
            return True
        shared = heads % size == 0 and (groups % size == 0 or size % groups == 0)
        return shared and exchanged_bytes(self, seen) < passed_bytes(self, seen)

    def _passed(self, seen: Tensor, dt: Tensor, context: Context) -> Tensor:
        """[B, s, H, P], by this rank's tokens and the states that others bring them."""
        parts = self._parts(self.conv(seen, context), self.heads, self.groups)
        return self._scanned(parts, dt, slice(None), self._chunks(seen, context, self.cp), partial(_states, self.cp))

    def _exchanged(self, seen: Tensor, dt: Tensor, context: Context) -> Tensor:
        """The same, by all tokens of a share of the heads."""
        exchange = AllToAll(self.cp)
        *parts, dt = exchange.to_heads([*self._parts(seen, self.heads, self.groups), dt])
        places = self._parts(torch.arange(seen.shape[-1], device=seen.device), self.heads, self.groups)
        channels = torch.cat([place[exchange.share(len(place))].flatten() for place in places])
        joined = self.conv.of_sequences(torch.cat([part.flatten(-2) for part in parts], -1), context, channels)
        parts = self._parts(joined, parts[0].shape[2], parts[1].shape[2])
        chunks = self._chunks(joined, context, ALONE)
        y = self._scanned(parts, dt, exchange.share(self.heads), chunks, partial(_states, ALONE))
        return exchange.to_tokens(y.to(seen.dtype))

    def _parts(self, seen: Tensor, heads: int, groups: int) -> list[Tensor]:
        """x, B and C of that many heads and groups, [.., H, P] and [.., G, K]: from their channels, [..]."""
        counts, size, state = (heads, groups, groups), self.mamba.head_dim, self.mamba.state_size
        split = torch.split(seen, [heads * size, groups * state, groups * state], -1)
        return [torch.unflatten(part, -1, (count, -1)) for part, count in zip(split, counts, strict=True)]

    def _scanned(self, parts: Sequence[Tensor], dt: Tensor, heads: slice, chunks: Chunks, states: Pass) -> Tensor:
        """S C + D x of some heads [B, S, H, P], of `_parts` and their dt [B, S, H, 1]."""
        x, b, c = parts
        d = F.softplus(wide(dt.squeeze(-1)) + wide(self.dt_bias[heads])).clamp(*self.mamba.dt_limit)
        y = scan(Steps(x, d, -wide(self.a_log[heads]).exp() * d, b, c), chunks, states)
        return y + wide(x) * wide(self.skip[heads]).unsqueeze(-1)

    def _chunks(self, x: Tensor, context: Context, group: Group) -> Chunks:
        """Those of the tokens that a rank of the group holds."""
        assert isinstance(context.sight, Sequences)
        spans = 1 if group.size == 1 else 2
        return Chunks(spans, min(self.mamba.chunk_size, x.shape[1] // spans), context.sight.reach(group))


def _states(group: Group, maps: Tensor, added: Tensor) -> Tensor:
    return pass_states(maps, added, None, group)[0]


def passed_bytes(layer: Mamba, seen: Tensor) -> int:
    """What a forward gathers by passing states: those of two spans of each rank, and the ends that the convolution sees."""
    mamba, rows = layer.mamba, len(seen)
    state = layer.heads * (mamba.head_dim * mamba.state_size + 1) * max(4, seen.itemsize)
    halo = (mamba.conv_kernel - 1) * seen.shape[-1] * seen.itemsize
    return rows * 2 * layer.cp.size * (state + halo)


def exchanged_bytes(layer: Mamba, seen: Tensor) -> int:
    """What it sends by exchanging heads: x, B, C and dt, and back y."""
    mamba, groups = layer.mamba, max(layer.groups, layer.cp.size)
    values = layer.heads * (2 * mamba.head_dim + 1) + 2 * groups * mamba.state_size
    return seen.shape[0] * seen.shape[1] * values * seen.itemsize


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
