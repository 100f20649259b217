"""Mamba-2 (arXiv:2405.21060) in Megatron's and transformers' conventions, heads split over the tensor ranks.

    z, dt, x, B, C = projections of the stream          x, B, C = silu(short convolution)
    d = softplus(dt + bias), within limits              S[t] = exp(d A) S[t-1] + d x B^T,  y = S C + D x
    out(norm(y silu(z)))                                the norm over the channels of each group; or norm(y) silu(z), or none

A group's B and C serve several heads. With fewer groups than tensor ranks, the ranks of a group hold the same B and C and
share the mean of its norm. Context ranks pass states or exchange tokens for heads, whichever is cheaper.

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

from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.selective_scan import ScanInputs, ScanPass
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.recurrent_mixer import RecurrentMixer, invert_softplus_of_steps
from mega_trainer.parallel.parameter_info import UniformInit
from mega_trainer.parallel.tensor_parallel import SplitHeads, sum_input_gradient, sum_partial_results


class MambaMixer(nn.Module):
    """Mamba-2 layer, a state-space token mixer.
    It has projections, a short convolution, the selective scan, a gated norm and an output projection.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        build = build.without_fp8
        mamba, tp, name = build.config.mamba, build.groups.tp, f"model.layers.{layer}.mamba"
        assert mamba is not None
        self.kernels, self.mamba, heads = build.kernels, mamba, mamba.num_heads // tp.size
        channels, state = partial(SplitHeads, count=mamba.num_heads, size=mamba.head_dim), mamba.state_size
        convolved = [channels("x"), *(SplitHeads(part, mamba.num_groups, state) for part in "BC")]
        blocks = [channels("z"), SplitHeads("dt", mamba.num_heads), *convolved]
        self.projection = build.build_column_linear(
            [SplitHeads(f"{name}.in_proj.{block.name}", block.count, block.size) for block in blocks], bias=mamba.bias
        )
        self.recurrence = RecurrentMixer(
            build, layer, f"{name}.conv1d", convolved, mamba.conv_kernel, bias=mamba.conv_bias, chunk=mamba.chunk_size,
            heads=channels("x"), state=mamba.head_dim * state + 1,
        )  # fmt: skip
        self.widths = [heads * mamba.head_dim, heads, self.recurrence.convolved_channels]
        low, high = map(math.log, mamba.dt_init)
        each = partial(SplitHeads, count=mamba.num_heads)
        draw_bias = partial(invert_softplus_of_steps, least=mamba.dt_init_floor)
        self.dt_bias = build.build_head_parameters(
            [each(f"{name}.dt_bias")], uniform=UniformInit(low, high, draw_bias)
        )[0]
        self.a_log = build.build_head_parameters([each(f"{name}.A_log")], uniform=UniformInit(1, 16, torch.log))[0]
        self.skip = build.build_head_parameters([each(f"{name}.D")], fill=1.0)[0]
        self.norm = GatedGroupNorm(build, f"{name}.norm.weight") if mamba.norm != "none" else None
        self.out = build.build_row_linear(f"{name}.out_proj", mamba.inner_size, bias=mamba.bias)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the output of the Mamba-2 layer, of an equal shape.
        S/T is the length under sequence parallelism.
        """
        z, dt, conv_input = torch.split(self.projection(x), self.widths, -1)
        y = self.recurrence(self._apply_scan, conv_input, (dt,), context)
        out: Tensor = self.out(_apply_gate(y.flatten(-2), z) if self.norm is None else self.norm(y.flatten(-2), z))
        return out

    def _apply_scan(
        self, parts: Sequence[Tensor], steps: Sequence[Tensor], heads: slice, chunks: SequenceChunks, states: ScanPass
    ) -> Tensor:
        """Return S C + D x of some heads [B, S, H, P], from x, B, C and dt [B, S, H]."""
        x, b, c = parts
        d = F.softplus(upcast_to_fp32(steps[0]) + upcast_to_fp32(self.dt_bias[heads])).clamp(*self.mamba.dt_limit)
        y = self.kernels.selective_scan(
            ScanInputs(x, d, -upcast_to_fp32(self.a_log[heads]).exp(), b, c), chunks, states
        )
        return y + upcast_to_fp32(x) * upcast_to_fp32(self.skip[heads]).unsqueeze(-1)


def _apply_gate(y: Tensor, z: Tensor) -> Tensor:
    """Return y silu(z) in the dtype of z."""
    return (upcast_to_fp32(y) * F.silu(upcast_to_fp32(z))).to(z.dtype)


class GatedGroupNorm(nn.Module):
    """Gated RMSNorm of Mamba-2: normalises y silu(z) over the channels of each group, or y before it is gated.
    The statistics include all ranks that share a group.
    """

    def __init__(self, build: LayerBuilder, name: str) -> None:
        super().__init__()
        mamba, tp = build.config.mamba, build.groups.tp
        assert mamba is not None
        self.eps, self.before_gate = mamba.norm_eps or build.config.norm_eps, mamba.norm == "before_gate"
        self.groups = max(1, mamba.num_groups // tp.size)
        self.sharing = build.groups.head_sharing_group(mamba.num_groups)
        self.weight = build.build_head_parameters([SplitHeads(name, mamba.num_heads, mamba.head_dim)], fill=1.0)[0]

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Apply the gated RMSNorm to y with gate z, both [B, S, H P], and return an equal shape.
        There are H heads of P channels. The result has the dtype of z; statistics are in at least fp32.
        """
        gate = F.silu(upcast_to_fp32(z))
        gated = torch.unflatten(upcast_to_fp32(y) * (1 if self.before_gate else gate), -1, (self.groups, -1))
        mean = gated.square().mean(-1, keepdim=True) / self.sharing.size
        mean = sum_input_gradient(sum_partial_results(mean, self.sharing, sp=False), self.sharing)
        normed = (gated * torch.rsqrt(mean + self.eps)).flatten(-2) * upcast_to_fp32(self.weight)
        return (normed * gate if self.before_gate else normed).to(z.dtype)
