"""Lightning attention (arXiv:2401.04658) in MiniMax-Text-01's conventions (arXiv:2501.08313), heads split over the tensor
ranks: linear attention without softmax, whose decay is fixed for each head.

    q, k, v, z = projections of the stream             q, k, v = silu(q, k, v)
    S[t] = exp(-s) S[t-1] + v k^T,  y = S q            s = 2^(-8 h/H) (1 - l/(L - 1)) of head h = 1, 2, .. in layer l
    out(norm(y) sigmoid(z))                            the norm over all heads of a token

It is Mamba-2's scan with a step size of 1, and is computed by it.

Legend: B batch, S sequence, T tensor ranks, D model width, H heads of K channels, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.selective_scan import ScanInputs, ScanPass
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.norms import AllHeadsRMSNorm
from mega_trainer.model.recurrent_mixer import RecurrentMixer
from mega_trainer.parallel.tensor_parallel import SplitHeads

OFFSET = 1e-5  # added to L - 1 and to the factor of the layer, as in MiniMax-Text-01


class LightningAttention(nn.Module):
    """Lightning attention layer, a linear-attention token mixer.
    It has projections, a recurrence with one fixed decay per head, a norm over all heads, an output gate and an output
    projection.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        lightning, tp, name = build.config.lightning, build.groups.tp, f"model.layers.{layer}.lightning"
        assert lightning is not None
        self.kernels, self.heads, self.size = build.kernels, lightning.num_heads, lightning.head_dim
        self.first_head = tp.rank * lightning.num_heads // tp.size
        self.layer_factor = 1 - layer / (build.config.num_layers - 1 + OFFSET) + OFFSET

        def channels(part: str) -> SplitHeads:
            return SplitHeads(part, lightning.num_heads, lightning.head_dim)

        self.projection = build.build_column_linear([channels(f"{name}.in_proj.{part}") for part in "qkvz"], bias=False)
        self.recurrence = RecurrentMixer(
            build, layer, name, [channels(part) for part in "qkv"], None, bias=False, chunk=lightning.chunk_size,
            heads=channels("v"), state=lightning.head_dim**2 + 1,
        )  # fmt: skip
        weight = build.build_head_parameters([channels(f"{name}.norm.weight")], fill=1.0)[0]
        self.norm = AllHeadsRMSNorm(weight, lightning.norm_eps, tp, zero_centered=False)
        self.out = build.build_row_linear(f"{name}.out_proj", lightning.inner_size, bias=False)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the output of lightning attention, of an equal shape.
        S/T is the length under sequence parallelism.
        """
        projected = self.projection(x, context.dropout)
        widths = [self.recurrence.convolved_channels, projected.shape[-1] // 4]
        qkv, z = torch.split(projected, widths, -1)
        normed = self.norm(self.recurrence(self._apply_scan, qkv, (), context)).flatten(-2)
        out: Tensor = self.out((upcast_to_fp32(normed) * upcast_to_fp32(z).sigmoid()).to(z.dtype), context.dropout)
        return out

    def _apply_scan(
        self, parts: Sequence[Tensor], steps: Sequence[Tensor], heads: slice, chunks: SequenceChunks, states: ScanPass
    ) -> Tensor:
        """Return S q of some heads [B, S, H, K], from q, k and v."""
        q, k, v = parts
        step = upcast_to_fp32(v[..., 0]).new_ones(v.shape[:-1])
        numbers = torch.arange(self.heads, device=v.device)[self.first_head :][heads][: v.shape[2]]
        decay = -self.layer_factor * 2.0 ** (-8 / self.heads * (numbers + 1).to(step.dtype))
        return self.kernels.selective_scan(ScanInputs(v, step, decay, k, q), chunks, states)
