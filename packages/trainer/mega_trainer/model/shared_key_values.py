"""Layers that attend to the keys and values of an earlier layer (Gemma 3n, Gemma 4).

The last layer of each window, before those without keys and values of their own, leaves its keys and values, normalised and
rotated, in the forward context. A KV cache has them once, under that layer's number.

Legend: B batch, S sequence, D model width, T tensor-parallel ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mega_trainer.model.attention import AttentionCore, SelfAttention
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.tensor_parallel import SplitHeads


class KeyValueSource(SelfAttention):
    """Self-attention that leaves its keys and values in the forward context for later layers that share them."""

    def _split_and_rotate(self, qkv: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Split into queries, keys and values, and leave keys and values in the forward context."""
        q, k, v = super()._split_and_rotate(qkv, context)
        context.key_values[self.core.window] = (self.core.layer, k, v)
        return q, k, v


class SharedKeyValueAttention(nn.Module):
    """Attention with query and output projections only, to the keys and values of an earlier layer with its window."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, name = build.config, f"model.layers.{layer}.self_attn"
        self.size, self.rotates = config.query_key_head_dim, config.has_rotary_positions(layer)
        self.core = AttentionCore(build, layer, scale=config.attention_scale)
        block = SplitHeads(f"{name}.q_proj", config.num_attention_heads, self.size)
        self.q = build.build_column_linear([block], bias=config.qkv_bias)
        width = config.num_attention_heads * self.size
        self.out = build.build_row_linear(f"{name}.o_proj", width, bias=config.attention_out_bias)
        self.norm = build.build_qk_norm(f"{name}.q_norm", config.num_attention_heads) if config.qk_norm else None

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the output of attention, of an equal shape.
        S/T is the length under sequence parallelism.
        """
        q, core = torch.unflatten(self.q(x, context.dropout), -1, (-1, self.size)), self.core
        q = q if self.norm is None else self.norm(q)
        rotation = context.rotation_for_window(core.window) if self.rotates else None
        q = q if rotation is None else core.kernels.apply_rotary(q, rotation)
        source, k, v = context.key_values[core.window]
        if context.cache is None:
            y = core(q, k, v, context)
        else:  # the source has stored the same keys and values
            attend = core.bind_cached_attention()
            y = context.cache.update_and_attend(source, q, k, v, core.window, attend)
        out: Tensor = self.out(y.flatten(-2), context.dropout)
        return out
