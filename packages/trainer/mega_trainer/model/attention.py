"""Self-attention with grouped key/value heads (arXiv:2305.13245), heads split over the tensor ranks.

Legend: B batch, S sequence, D model width, H query heads, K key/value heads, d head size, T tensor-parallel ranks.
With K < T every key/value head lives on T/K ranks, whose gradients for it are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mega_trainer.model.activation import opened
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.core import AttentionCore
from mega_trainer.model.relative import OwnTable
from mega_trainer.parallel.tensor import Heads


class Attention(nn.Module):
    """Fused query-key-value projection, rotation, attention, output projection; with `attention_gate` what goes into that is
    multiplied by the sigmoid of a further projection beside the queries', as in Qwen3-Next (arXiv:2505.06708).
    """

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        config, tp = build.config, build.groups.tp
        name = f"model.layers.{layer}.self_attn"
        self.size, self.rotates = config.head_size, config.rotates(layer)
        self.heads = config.num_attention_heads // tp.size
        self.kv_heads = max(1, config.kv_heads // tp.size)
        sinks = build.sinks(f"{name}.sinks") if config.attention_sinks else None
        self.core = AttentionCore(build, layer, scale=config.attention_scale, sinks=sinks)
        own = config.position == "relative" and config.relative.every_layer
        self.relative = OwnTable(build, f"{name}.relative_bias", causal=not config.encodes(layer)) if own else None
        self.gated, self.saved = config.attention_gate, build.saved
        counts = {"g": config.num_attention_heads} if self.gated else {}  # first, where it splits no neighbours
        counts |= {"q": config.num_attention_heads, "k": config.kv_heads, "v": config.kv_heads}
        blocks = [Heads(f"{name}.{x}_proj", count, self.size) for x, count in counts.items()]
        self.qkv = build.column(blocks, bias=config.qkv_bias)
        self.out = build.row(f"{name}.o_proj", config.num_attention_heads * self.size, bias=config.attention_out_bias)
        self.q_norm = build.qk_norm(f"{name}.q_norm", config.num_attention_heads) if config.qk_norm else None
        self.k_norm = build.qk_norm(f"{name}.k_norm", config.kv_heads) if config.qk_norm else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, S or S/T, D] -> the same shape."""
        gate, qkv = None, self.qkv(x, context.dropout)
        if self.gated:
            gate, qkv = torch.tensor_split(qkv, [self.heads * self.size], -1)
        q, k, v = self._rotated(torch.unflatten(qkv, -1, (-1, self.size)), context)
        y = self.core(q, k, v, context if self.relative is None else self.relative.within(context)).flatten(-2)
        out: Tensor = self.out(y if gate is None else self.saved.again("activation", opened, y, gate), context.dropout)
        return out

    def _rotated(self, qkv: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [B, S, H + 2K, d], as attention takes them."""
        rotation, kernels = context.rotation_within(self.core.window) if self.rotates else None, self.core.kernels
        if rotation is not None and self.q_norm is None:
            return kernels.rotate_qkv(qkv, rotation, self.heads, self.kv_heads)
        q, k, v = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], -2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return (q, k, v) if rotation is None else (kernels.rotate(q, rotation), kernels.rotate(k, rotation), v)
