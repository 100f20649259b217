"""Self-attention whose values have a head size of their own, a constant factor on values, and a softplus output gate.

MiMo-V2 has values narrower than keys, multiplied by a constant. Laguna multiplies the output of each head, or of each
channel, by softplus(x g) of another projection, without bias.

    q, k, v, g = projections of x        q, k = rotate(norm(q)), rotate(norm(k))
    y = attention(q, k, c v)             out(y softplus(g))

Legend: B batch, S sequence, T tensor ranks, D model width, H this rank's query heads, K its key/value heads, d size of
queries and keys, e of values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.model.attention import AttentionCore
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.tensor_parallel import SplitHeads


class AsymmetricAttention(nn.Module):
    """Self-attention with values of another head size than queries and keys, scaled values and a softplus gate.
    Queries, keys, values and gates come from one column-parallel projection.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, tp, name = build.config, build.groups.tp, f"model.layers.{layer}.self_attn"
        self.size, self.value_size = config.query_key_head_dim, config.attention_value_dim
        self.rotates, self.scale = config.has_rotary_positions(layer), config.value_scale
        heads, kv_heads = config.num_attention_heads, config.key_value_heads
        own, own_kv = heads // tp.size, max(1, kv_heads // tp.size)
        gate_size = {None: 0, "head": 1, "channel": self.value_size}[config.softplus_gate]
        blocks = [
            SplitHeads(f"{name}.q_proj", heads, self.size),
            SplitHeads(f"{name}.k_proj", kv_heads, self.size),
            SplitHeads(f"{name}.v_proj", kv_heads, self.value_size),
            *([SplitHeads(f"{name}.g_proj", heads, gate_size)] if gate_size else []),
        ]
        self.widths = [own * self.size, own_kv * self.size, own_kv * self.value_size, own * gate_size]
        self.gate_size, self.saved = gate_size, build.saved
        self.qkv = build.build_column_linear(blocks, bias=config.qkv_bias)
        sinks = build.build_attention_sinks(f"{name}.sinks") if config.attention_sinks else None
        self.core = AttentionCore(build, layer, scale=config.attention_scale, sinks=sinks)
        norms = config.qk_norm and (self.rotates or config.qk_norm_span != "plain")
        self.q_norm = build.build_qk_norm(f"{name}.q_norm", heads) if norms else nn.Identity()
        self.k_norm = build.build_qk_norm(f"{name}.k_norm", kv_heads) if norms else nn.Identity()
        self.out = build.build_row_linear(f"{name}.o_proj", heads * self.value_size, bias=config.attention_out_bias)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the output of attention, of an equal shape.
        S/T is the length under sequence parallelism.
        """
        q, k, v, gate = torch.split(self.qkv(x, context.dropout), self.widths, -1)
        q = self.q_norm(torch.unflatten(q, -1, (-1, self.size)))
        k = self.k_norm(torch.unflatten(k, -1, (-1, self.size)))
        v = torch.unflatten(v if self.scale == 1 else v * self.scale, -1, (-1, self.value_size))
        rotation = context.rotation_for_window(self.core.window) if self.rotates else None
        if rotation is not None:
            q, k = (self.core.kernels.apply_rotary(part, rotation) for part in (q, k))
        y = self.core(q, k, v, context)
        if self.gate_size:
            gate = torch.unflatten(gate, -1, (-1, self.gate_size))
            y = self.saved.recompute_output("activation", apply_softplus_gate, y, gate)
        out: Tensor = self.out(y if self.gate_size else y.flatten(-2), context.dropout)
        return out


def apply_softplus_gate(y: Tensor, gate: Tensor) -> Tensor:
    """Multiply heads y [B, S, H, e] by softplus of a gate [B, S, H, 1 or e], and join them: [B, S, H e].
    Softplus is computed in at least fp32.
    """
    return (y * F.softplus(upcast_to_fp32(gate)).to(y.dtype)).flatten(-2)
