"""Self-attention with grouped key/value heads (arXiv:2305.13245), heads split over the tensor ranks.

Legend: B batch, S sequence, D model width, H query heads, K key/value heads, d head size, T tensor-parallel ranks.
With K < T every key/value head lives on T/K ranks, whose gradients for it are summed (the kv group).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.parallel.tensor import ColumnLinear


class Attention(nn.Module):
    """Fused query-key-value projection, rotation, attention, output projection."""

    def __init__(self, build: Builder, layer: int, *, recompute: bool = False) -> None:
        super().__init__()
        config, tp = build.config, build.groups.tp
        name = f"model.layers.{layer}.self_attn"
        self.layer, self.recompute, self.kernels = layer, recompute, build.kernels
        self.heads = config.num_attention_heads // tp.size
        self.kv_heads = max(1, config.kv_heads // tp.size)
        self.size, self.dropout, self.first_head = config.head_size, config.attention_dropout, tp.rank * self.heads
        self.qkv = self._projection(build, name)
        self.out = build.row(f"{name}.o_proj", config.num_attention_heads * self.size, bias=config.attention_out_bias)
        self.q_norm = build.qk_norm(f"{name}.q_norm", config.num_attention_heads) if config.qk_norm else None
        self.k_norm = build.qk_norm(f"{name}.k_norm", config.kv_heads) if config.qk_norm else None

    def _projection(self, build: Builder, name: str) -> ColumnLinear:
        config, groups = build.config, build.groups
        query = [(f"{name}.q_proj", config.num_attention_heads * self.size)]
        key_value = [(f"{name}.{x}_proj", config.kv_heads * self.size) for x in "kv"]
        if config.kv_heads >= groups.tp.size:
            return build.column(query + key_value, bias=config.qkv_bias)
        projection = build.column(query, bias=config.qkv_bias)
        head = groups.tp.rank * config.kv_heads // groups.tp.size
        shared = build.shared_rows(key_value, index=head, rows=self.size, bias=config.qkv_bias)
        projection.weights.append(shared[0])
        if config.qkv_bias:
            projection.biases.append(shared[1])
        return projection

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, S or S/T, D] -> the same shape."""
        widths = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        q, k, v = (t.unflatten(-1, (-1, self.size)) for t in self.qkv(x).split(widths, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rotation is not None:
            q, k = context.rotation.apply(q), context.rotation.apply(k)
        if context.cache is not None:
            k, v = context.cache.update(self.layer, k, v)
        y: Tensor
        if self.recompute and self.training:
            y = checkpoint(self._core, q, k, v, context, use_reentrant=False, preserve_rng_state=False)
        else:
            y = self._core(q, k, v, context)
        out: Tensor = self.out(y.flatten(-2))
        return out

    def _core(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        if context.dropout is not None and self.dropout:
            return self._with_dropout(q, k, v, context)
        return self.kernels.attention(q, k, v, context.mask)

    def _with_dropout(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attention in plain products: the fused ones draw their own masks, which would depend on the layout."""
        assert context.dropout is not None
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size)
        mask = context.mask
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        p = context.dropout.scores(p, self.dropout, self.layer, self.first_head)
        return (p @ v).transpose(1, 2)
