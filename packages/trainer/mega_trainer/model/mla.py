"""Multi-head latent attention (arXiv:2405.04434), in DeepSeek's and transformers' conventions.

Keys and values come from one narrow latent a token, and a rotated part of the key that all heads share:

    c = norm(x A)   [B, S, c]      k_rot = rotate(x A')   [B, S, r]      (A and A' are `kv_a_proj_with_mqa`)
    k_h = [c K_h, k_rot]           v_h = c V_h                           (K_h and V_h are `kv_b_proj`)
    q_h = [x Q_h, rotate(x Q'_h)], or with norm(x A'') in x's place      (`q_proj`, or `q_b_proj` after `q_a_proj`)

The products that widen a latent are split over the tensor ranks by heads; those into latents are narrow, and whole on
every rank. Under sequence parallelism each rank makes the latents of its part of the sequence, and these are gathered
rather than x, which is several times wider; the gradients of all ranks' heads are summed where they come back.

A cache holds c and k_rot alone. With it, attention happens in the latent space, for (q_h, c K_h) = (q_h K_h^T, c): one
key [c, k_rot] and one value c serve all heads, and V_h comes after.

Legend: B batch, S queries, T keys, D model width, H this rank's heads, n and r the parts of queries and keys without and
with rotation, e size of a value, c of the latent, q of the queries' latent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mega_common.model_config import ModelConfig
from mega_trainer.model.adapters import whole_adapter
from mega_trainer.model.builder import Builder
from mega_trainer.model.cached import Cache
from mega_trainer.model.context import Context
from mega_trainer.model.core import AttentionCore
from mega_trainer.model.norms import Norm
from mega_trainer.model.rope import yarn_mscale
from mega_trainer.parallel.linear import Linear
from mega_trainer.parallel.tensor import Heads, whole_sequence
from mega_trainer.rng import Dropout


class LatentAttention(nn.Module):
    """Queries, latent, attention, output projection."""

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        config, mla, tp = build.config, build.config.mla, build.groups.tp
        assert mla is not None
        name, heads = f"model.layers.{layer}.self_attn", config.num_attention_heads
        self.mla, self.size = mla, config.head_size
        self.linear, self.tp, self.sp = build.linear, tp, build.sp
        self.core = AttentionCore(build, layer, scale=score_scale(config))
        if mla.q_lora_rank is None:
            self.query = build.column([Heads(f"{name}.q_proj", heads, self.size)], bias=False)
        else:
            self.query_latent = Latent(build, f"{name}.q_a_proj", mla.q_lora_rank, f"{name}.q_a_layernorm")
            self.query_heads = build.split(f"{name}.q_b_proj", heads * self.size, mla.q_lora_rank)
            self.query_adapter = build.split_adapter(f"{name}.q_b_proj", heads * self.size, mla.q_lora_rank)
        self.latent = Latent(
            build, f"{name}.kv_a_proj_with_mqa", mla.kv_lora_rank, f"{name}.kv_a_layernorm", mla.qk_rope_head_dim
        )
        rows = mla.qk_nope_head_dim + mla.v_head_dim
        self.key_value_heads = build.split(f"{name}.kv_b_proj", heads * rows, mla.kv_lora_rank)
        self.key_value_adapter = build.split_adapter(f"{name}.kv_b_proj", heads * rows, mla.kv_lora_rank)
        self.out = build.row(f"{name}.o_proj", heads * mla.v_head_dim, bias=config.attention_out_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, S or S/T, D] -> the same shape."""
        rotation = context.rotation_within(self.core.window)
        assert rotation is not None
        q, latent, k_rot = self._projected(x, context.dropout)
        parts = [self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim]
        q, q_rot = torch.split(torch.unflatten(q, -1, (-1, self.size)), parts, -1)
        q_rot, k_rot = (self.core.kernels.rotate(x, rotation) for x in (q_rot, k_rot.unsqueeze(-2)))
        if context.cache is None:
            y = self._attend(q, q_rot, latent, k_rot, context)
        else:
            y = self._attend_cached(q, q_rot, latent.unsqueeze(-2), k_rot, context.cache)
        out: Tensor = self.out(y.flatten(-2), context.dropout)
        return out

    def _projected(self, x: Tensor, dropout: Dropout | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, S, H (n + r)], latent [B, S, c] and the shared part of the key [B, S, r], of the whole sequence."""
        widths = [self.mla.kv_lora_rank, self.mla.qk_rope_head_dim]
        if self.mla.q_lora_rank is None:
            latent, k_rot = torch.split(whole_sequence(self.latent(x, dropout), self.tp, sp=self.sp), widths, -1)
            return self.query(x, dropout), latent, k_rot
        pair = [latent(x, dropout) for latent in (self.query_latent, self.latent)]
        joined = whole_sequence(torch.cat(pair, -1), self.tp, sp=self.sp)
        q, latent, k_rot = torch.split(joined, [self.mla.q_lora_rank, *widths], -1)
        y = self.linear(q, self.query_heads)
        return (
            y if self.query_adapter is None else self.query_adapter(q, y, self.query_heads, None, dropout),
            latent,
            k_rot,
        )

    def _attend(self, q: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, context: Context) -> Tensor:
        """[B, S, H, e], with keys and values of every head."""
        heads, widths = q.shape[-2], [self.mla.qk_nope_head_dim, self.mla.v_head_dim]
        key_value = self.linear(latent, self.key_value_heads)
        if self.key_value_adapter is not None:
            key_value = self.key_value_adapter(latent, key_value, self.key_value_heads, None, context.dropout)
        k, v = torch.split(torch.unflatten(key_value, -1, (heads, -1)), widths, -1)
        k = torch.cat([k, k_rot.expand(-1, -1, heads, -1)], -1)
        y: Tensor = self.core(torch.cat([q, q_rot], -1), k, v, context)
        return y

    def _attend_cached(self, q: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, cache: Cache) -> Tensor:
        """[B, S, H, e], in the latent space, with all of the cache."""
        widths = [self.mla.qk_nope_head_dim, self.mla.v_head_dim]
        to_key, to_value = torch.split(torch.unflatten(self.key_value_heads, 0, (-1, sum(widths))), widths, 1)
        q = torch.cat([torch.einsum("bshn,hnc->bshc", q, to_key), q_rot], -1)
        # values as wide as keys, which fused kernels want: what comes of k_rot is dropped
        y = self.core.cached(q, torch.cat([latent, k_rot], -1), None, cache)[..., : self.mla.kv_lora_rank]
        return torch.einsum("bshc,hec->bshe", y, to_value)


class Latent(nn.Module):
    """x A, the first `width` columns of it normed; `more` further columns are not. Whole on every tensor rank."""

    def __init__(self, build: Builder, projection: str, width: int, norm: str, more: int = 0) -> None:
        super().__init__()
        config, mla = build.config, build.config.mla
        assert mla is not None
        # small, and of widths such as 576: not in fp8
        self.linear, self.width = Linear(build.kernels, build.deferred), width
        rows = width + more
        self.weight = build.replicated(f"{projection}.weight", (rows, config.hidden_size), std=config.init_std)
        self.bias = build.replicated(f"{projection}.bias", (rows,)) if config.qkv_bias else None
        self.adapter = whole_adapter(build, projection)
        self.norm = Norm(build.kernels, build.replicated(f"{norm}.weight", (width,), fill=1.0), None, mla.norm_eps)

    def forward(self, x: Tensor, dropout: Dropout | None = None) -> Tensor:
        """[B, S or S/T, D] -> [B, S or S/T, width + more]."""
        y = self.linear(x, self.weight, self.bias)
        y = y if self.adapter is None else self.adapter(x, y, self.weight, self.bias, dropout)
        normed: Tensor = self.norm(y[..., : self.width])
        return normed if y.shape[-1] == self.width else torch.cat([normed, y[..., self.width :]], -1)


def score_scale(config: ModelConfig) -> float:
    """The factor on scores: 1 / sqrt(n + r), times the square of YaRN's mscale where `rope.mscale_all_dim` is given."""
    scale = config.attention_scale or 1 / math.sqrt(config.head_size)
    if config.rope.scaling == "yarn" and config.rope.mscale_all_dim:
        scale *= yarn_mscale(config.rope, config.rope.mscale_all_dim) ** 2
    return scale
