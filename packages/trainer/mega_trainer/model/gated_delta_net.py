"""Gated DeltaNet (arXiv:2412.06464) in transformers' and Megatron's conventions, heads split over the tensor ranks.

    q, k, v, z, b, a = projections of the stream            q, k, v = silu(short convolution)
    g = -exp(A) softplus(a + bias), beta = sigmoid(b)       y = delta rule (q, k, v, g, beta)
    or beta = 2 sigmoid(b), by which a transition may have negative eigenvalues (arXiv:2411.12537)
    out(norm(y) silu(z))                                    the norm over each value head, with one weight

A key head serves several value heads. With fewer key heads than tensor ranks, consecutive ranks hold the same key head.

Legend: B batch, S sequence, T tensor ranks, D model width, G this rank's key heads of K channels, H its value heads of V
channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.gated_delta_rule import DeltaRuleInputs, DeltaRulePass
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.norms import Norm
from mega_trainer.model.recurrent_mixer import RecurrentMixer
from mega_trainer.parallel.parameter_info import UniformInit
from mega_trainer.parallel.tensor_parallel import SplitHeads


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet layer, a linear-attention token mixer.
    It has projections, a short convolution, the gated delta rule, a gated norm and an output projection.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        build = build.without_fp8
        delta, tp, name = build.config.delta, build.groups.tp, f"model.layers.{layer}.linear_attn"
        assert delta is not None
        keys = partial(SplitHeads, count=delta.num_key_heads, size=delta.key_head_dim)
        values = partial(SplitHeads, count=delta.num_value_heads, size=delta.value_head_dim)
        each = partial(SplitHeads, count=delta.num_value_heads)
        convolved = [keys("q"), keys("k"), values("v")]
        blocks = [
            SplitHeads(f"{name}.in_proj.{block.name}", block.count, block.size)
            for block in (*convolved, values("z"), each("b"), each("a"))
        ]
        self.kernels, self.projection = build.kernels, build.build_column_linear(blocks, bias=False)
        self.recurrence = RecurrentMixer(
            build, layer, f"{name}.conv1d", convolved, delta.conv_kernel, bias=False, chunk=delta.chunk_size,
            heads=values("v"), state=delta.key_head_dim * (delta.key_head_dim + delta.value_head_dim),
        )  # fmt: skip
        heads = delta.num_value_heads // tp.size
        self.strength = 2.0 if delta.negative_eigenvalues else 1.0
        self.widths = [self.recurrence.convolved_channels, heads * delta.value_head_dim, heads, heads]
        self.a_log = build.build_head_parameters([each(f"{name}.A_log")], uniform=UniformInit(0.01, 16, torch.log))[0]
        self.dt_bias = build.build_head_parameters([each(f"{name}.dt_bias")], fill=1.0)[0]
        # partial_grad: a rank's gradient is only from its own heads
        weight = build.build_replicated(f"{name}.norm.weight", (delta.value_head_dim,), fill=1.0, partial_grad=True)
        self.norm = Norm(build.kernels, weight, None, delta.norm_eps or build.config.norm_eps)
        self.out = build.build_row_linear(f"{name}.out_proj", delta.num_value_heads * delta.value_head_dim, bias=False)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the output of the Gated DeltaNet layer, of an equal shape.
        S/T is the length under sequence parallelism.
        """
        conv_input, z, b, a = torch.split(self.projection(x), self.widths, -1)
        normed = self.norm(self.recurrence(self._apply_delta_rule, conv_input, (b, a), context)).flatten(-2)
        out: Tensor = self.out((upcast_to_fp32(normed) * F.silu(upcast_to_fp32(z))).to(z.dtype))
        return out

    def _apply_delta_rule(
        self,
        parts: Sequence[Tensor],
        steps: Sequence[Tensor],
        heads: slice,
        chunks: SequenceChunks,
        states: DeltaRulePass,
    ) -> Tensor:
        """Apply the delta rule of some value heads, from q, k, v and from b and a [B, S, H]: [B, S, H, V]."""
        q, k, v = parts
        b, a = (upcast_to_fp32(step) for step in steps)
        g = -upcast_to_fp32(self.a_log[heads]).exp() * F.softplus(a + upcast_to_fp32(self.dt_bias[heads]))
        beta = b.sigmoid() if self.strength == 1 else b.sigmoid() * self.strength
        return self.kernels.gated_delta_rule(DeltaRuleInputs(q, k, v, g, beta), chunks, states)
