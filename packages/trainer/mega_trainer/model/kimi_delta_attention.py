"""Kimi Delta Attention (KDA, arXiv:2510.26692) in transformers' conventions, heads split over the tensor ranks.

    q, k, v, b = projections of the stream                  q, k, v = silu(short convolution)
    f = x F F', z = x Z Z'                                  low-rank gates; F and Z are whole on every tensor rank
    g = -exp(A) softplus(f + bias), beta = sigmoid(b)       y = delta rule (q, k, v, g, beta), with a decay per key channel
    out(norm(y) sigmoid(z))                                 the norm over each head, with one weight

It differs from the gated delta net in the decay, which is of each channel of a key rather than of a head. In Ling 3, f and z
are full projections, and g is at least a bound m: g = m sigmoid(exp(A) (f + bias)).

Legend: B batch, S sequence, T tensor ranks, D model width, H this rank's heads of K channels, r rank of the gates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.gated_delta_rule import DeltaRuleInputs, DeltaRulePass
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.latent_attention import LatentProjection
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.norms import Norm
from mega_trainer.model.recurrent_mixer import RecurrentMixer, invert_softplus_of_steps
from mega_trainer.parallel.parameter_info import UniformInit
from mega_trainer.parallel.tensor_parallel import SplitHeads, gather_from_sequence_parallel_region

DT_INIT = (math.log(1e-3), math.log(1e-1))  # range of the initial softplus(bias), as logarithms
DT_FLOOR = 1e-4  # its least value


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention layer, a linear-attention token mixer.
    It has projections, a short convolution, the delta rule with a decay per channel, a gated norm and an output projection.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        build = build.without_fp8
        kda, tp, name = build.config.kda, build.groups.tp, f"model.layers.{layer}.kda"
        assert kda is not None
        channels = partial(SplitHeads, count=kda.num_heads, size=kda.head_dim)
        convolved = [channels(part) for part in "qkv"]
        blocks = [channels(f"{name}.in_proj.{part}") for part in "qkv"]
        blocks.append(SplitHeads(f"{name}.in_proj.b", kda.num_heads))
        gates = () if kda.low_rank_gates else ("f", "g")
        blocks += [channels(f"{name}.in_proj.{gate}") for gate in gates]
        self.kernels, self.tp, self.sp, self.size = build.kernels, tp, build.sp, kda.head_dim
        self.projection = build.build_column_linear(blocks, bias=False)
        self.gates = nn.ModuleList(
            LowRankGate(build, f"{name}.{gate}", kda.inner_size, kda.head_dim) for gate in "fg" if not gates
        )
        self.gate_floor = kda.gate_floor
        self.recurrence = RecurrentMixer(
            build, layer, f"{name}.conv1d", convolved, kda.conv_kernel, bias=False, chunk=kda.chunk_size,
            heads=channels("v"), state=2 * kda.head_dim**2,
        )  # fmt: skip
        heads, inner = kda.num_heads // tp.size, kda.inner_size // tp.size
        self.widths = [self.recurrence.convolved_channels, heads, *(inner for _ in gates)]
        draw_bias = partial(invert_softplus_of_steps, least=DT_FLOOR)
        self.dt_bias = build.build_head_parameters(
            [channels(f"{name}.dt_bias")], uniform=UniformInit(*DT_INIT, draw_bias)
        )[0]
        a_log = SplitHeads(f"{name}.A_log", kda.num_heads)
        self.a_log = build.build_head_parameters([a_log], uniform=UniformInit(1, 16, torch.log))[0]
        # partial_grad: a rank's gradient is only from its own heads
        weight = build.build_replicated(f"{name}.norm.weight", (kda.head_dim,), fill=1.0, partial_grad=True)
        self.norm = Norm(build.kernels, weight, None, kda.norm_eps or build.config.norm_eps)
        self.out = build.build_row_linear(f"{name}.out_proj", kda.inner_size, bias=False)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the output of Kimi Delta Attention, of an equal shape.
        S/T is the length under sequence parallelism.
        """
        dropout = context.dropout
        conv_input, b, *full = torch.split(self.projection(x, dropout), self.widths, -1)
        f, z = full or self._project_low_rank_gates(x, dropout)
        normed = self.norm(self.recurrence(self._apply_delta_rule, conv_input, (b, f), context)).flatten(-2)
        out: Tensor = self.out((upcast_to_fp32(normed) * upcast_to_fp32(z).sigmoid()).to(z.dtype), dropout)
        return out

    def _project_low_rank_gates(self, x: Tensor, dropout: SeededDropout | None) -> list[Tensor]:
        """Return this rank's channels of the gates f and z, [B, S, H K] of the whole sequence."""
        gates = [gate for gate in self.gates if isinstance(gate, LowRankGate)]
        latents = gather_from_sequence_parallel_region(
            torch.cat([gate.down(x, dropout) for gate in gates], -1), self.tp, sp=self.sp
        )
        return [gate(latent, dropout) for gate, latent in zip(gates, latents.chunk(2, -1), strict=True)]

    def _apply_delta_rule(
        self,
        parts: Sequence[Tensor],
        steps: Sequence[Tensor],
        heads: slice,
        chunks: SequenceChunks,
        states: DeltaRulePass,
    ) -> Tensor:
        """Apply the delta rule of some heads, from q, k and v, and from b [B, S, H] and f [B, S, H K]: [B, S, H, K]."""
        q, k, v = parts
        b, f = (upcast_to_fp32(step) for step in steps)
        bias = torch.unflatten(upcast_to_fp32(self.dt_bias), 0, (-1, self.size))[heads]
        decay = upcast_to_fp32(self.a_log[heads]).exp().unsqueeze(-1)
        f = torch.unflatten(f, -1, (-1, self.size)) + bias
        g = -decay * F.softplus(f) if self.gate_floor is None else self.gate_floor * (decay * f).sigmoid()
        return self.kernels.gated_delta_rule(DeltaRuleInputs(q, k, v, g, b.sigmoid()), chunks, states)


class LowRankGate(nn.Module):
    """Low-rank projection x A B of a gate: A [r, D] is whole on every tensor rank, B [H K, r] split by heads."""

    def __init__(self, build: LayerBuilder, name: str, rows: int, rank: int) -> None:
        super().__init__()
        self.linear = build.unsharded_linear
        self.down = LatentProjection(build, f"{name}_a_proj", rank)
        self.weight = build.build_column_weight(f"{name}_b_proj", rows, rank)
        self.adapter = build.build_column_weight_adapter(f"{name}_b_proj", rows, rank)

    def forward(self, latent: Tensor, dropout: SeededDropout | None) -> Tensor:
        """Map x A [B, S, r] of the whole sequence to this rank's channels of the gate, [B, S, H K]."""
        y = self.linear(latent, self.weight)
        return y if self.adapter is None else self.adapter(latent, y, self.weight, None, dropout)
