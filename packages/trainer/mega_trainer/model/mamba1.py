"""Mamba-1 (arXiv:2312.00752) in transformers' conventions, channels split over the tensor ranks.

    x, z = projections of the stream                    x = silu(short convolution)
    t, B, C = norms of projections of x                 of all channels: summed over the tensor ranks
    d = softplus(t T + bias)                            S[t] = exp(d A) * S[t-1] + d x B^T,  y = S C + D x
    out(y silu(z))

Each channel has its own step size d and its own decay A of each state; B and C serve all channels. The norms are missing in
Mamba, without weights in Falcon-Mamba and with weights in Jamba. Context ranks pass states on: heads are not exchanged, since
t, B and C need all channels of a token.

Legend: B batch, S sequence, T tensor ranks, D model width, I this rank's channels, N states of a channel, R rank of t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.selective_scan import ScanInputs, ScanPass
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.norms import Norm, PlainNorm
from mega_trainer.model.recurrent_mixer import RecurrentMixer, invert_softplus_of_steps
from mega_trainer.parallel.parameter_info import UniformInit
from mega_trainer.parallel.tensor_parallel import SplitHeads, sum_input_gradient, sum_partial_results


class Mamba1Mixer(nn.Module):
    """Mamba-1 layer, a state-space token mixer with a step size per channel.
    It has projections, a short convolution, the selective scan, a gate and an output projection.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        build = build.without_fp8
        mamba, name = build.config.mamba1, f"model.layers.{layer}.mamba1"
        assert mamba is not None
        channels = partial(SplitHeads, count=mamba.inner_size)
        self.kernels = build.kernels
        self.projection = build.build_column_linear(
            [channels(f"{name}.in_proj.{part}") for part in "xz"], bias=mamba.bias
        )
        self.recurrence = StatePassingMixer(
            build, layer, f"{name}.conv1d", [channels("x")], mamba.conv_kernel, bias=mamba.conv_bias, chunk=mamba.chunk_size,
            heads=channels("x"), state=2 * mamba.state_size,
        )  # fmt: skip
        self.selection = ScanSelection(build, name)
        self.a_log = build.build_head_parameters(
            [channels(f"{name}.A_log")], (mamba.state_size,), uniform=UniformInit(0, 1, _count_states)
        )[0]
        self.skip = build.build_head_parameters([channels(f"{name}.D")], fill=1.0)[0]
        self.out = build.build_row_linear(f"{name}.out_proj", mamba.inner_size, bias=mamba.bias)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the output of the Mamba-1 layer, of an equal shape.
        S/T is the length under sequence parallelism.
        """
        x, z = self.projection(x).chunk(2, -1)
        y = self.recurrence(self._apply_scan, x, (), context).flatten(-2)
        out: Tensor = self.out((y * F.silu(upcast_to_fp32(z))).to(z.dtype))
        return out

    def _apply_scan(
        self, parts: Sequence[Tensor], steps: Sequence[Tensor], heads: slice, chunks: SequenceChunks, states: ScanPass
    ) -> Tensor:
        """Return S C + D x of this rank's channels, [B, S, I, 1], from the convolved x."""
        (x,) = parts
        d, b, c = self.selection(x.squeeze(-1))
        decay = -upcast_to_fp32(self.a_log).exp()
        y = self.kernels.selective_scan(ScanInputs(x, d, decay, b.unsqueeze(2), c.unsqueeze(2)), chunks, states)
        return y + upcast_to_fp32(x) * upcast_to_fp32(self.skip).unsqueeze(-1)


class StatePassingMixer(RecurrentMixer):
    """Recurrent mixer whose context ranks always pass states: its recurrence needs all channels of a token."""

    def _should_exchange_heads(self, conv_input: Tensor, steps: int) -> bool:
        return False


class ScanSelection(nn.Module):
    """Projections of the convolved input to the step sizes, B and C of Mamba-1's scan.

    A projection of all channels, summed over the tensor ranks, gives t, B and C; each may be normalised. A second
    projection maps t to this rank's step sizes. The gradients of t, B and C are summed before the norms, whose weights
    so have partial gradients.
    """

    def __init__(self, build: LayerBuilder, name: str) -> None:
        super().__init__()
        mamba, tp, std = build.config.mamba1, build.groups.tp, build.config.init_std
        assert mamba is not None
        self.linear, self.tp = build.unsharded_linear, tp
        sizes = {"dt": mamba.dt_rank, "B": mamba.state_size, "C": mamba.state_size}
        self.widths = list(sizes.values())
        rows, own = sum(self.widths), mamba.inner_size // tp.size
        piece = TensorPiece(f"{name}.x_proj.weight", (rows, mamba.inner_size), (0, tp.rank * own), (0, 0), (rows, own))
        self.weight = build.build_parameter((rows, own), [piece], std=std)
        eps = mamba.norm_eps or build.config.norm_eps
        norms: list[nn.Module] = []
        if mamba.norms == "plain":
            norms = [PlainNorm(eps) for _ in sizes]
        elif mamba.norms == "weight":
            weights = (
                build.build_replicated(f"{name}.{part}_norm.weight", (size,), fill=1.0, partial_grad=True)
                for part, size in sizes.items()
            )
            norms = [Norm(build.kernels, weight, None, eps) for weight in weights]
        self.norms = nn.ModuleList(norms)
        bound, (low, high) = mamba.dt_rank**-0.5, map(math.log, mamba.dt_init)
        draw_bias = partial(invert_softplus_of_steps, least=mamba.dt_init_floor)
        self.steps, self.bias = (
            build.build_head_parameters(
                [SplitHeads(f"{name}.dt_proj.{kind}", mamba.inner_size)], tail, uniform=uniform
            )[0]
            for kind, tail, uniform in (
                ("weight", (mamba.dt_rank,), UniformInit(-bound, bound)),
                ("bias", (), UniformInit(low, high, draw_bias)),
            )
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map this rank's convolved channels x [B, S, I] to the step sizes, B and C of the scan.
        Step sizes are [B, S, I] in at least fp32, B and C [B, S, N].
        """
        summed = sum_partial_results(self.linear(x, self.weight), self.tp, sp=False)
        parts = torch.split(sum_input_gradient(summed, self.tp), self.widths, -1)
        t, b, c = (norm(part) for norm, part in zip(self.norms, parts, strict=True)) if self.norms else parts
        return F.softplus(upcast_to_fp32(self.linear(t, self.steps)) + upcast_to_fp32(self.bias)), b, c


def _count_states(tile: Tensor) -> Tensor:
    """Return the initial A_log of a tile [channels, N]: the logarithms of 1, 2, .. N in each row (S4D-Real)."""
    return torch.arange(1, 1 + tile.shape[-1], device=tile.device).to(tile.dtype).log().expand_as(tile)
