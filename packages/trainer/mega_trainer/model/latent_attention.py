"""Multi-head latent attention (MLA, arXiv:2405.04434), in DeepSeek's and transformers' conventions.

Keys and values come from one narrow latent per token, and a rotated part of the key that all heads share:

    c = norm(x A)   [B, S, c]      k_rot = rotate(x A')   [B, S, r]      (A and A' are `kv_a_proj_with_mqa`)
    k_h = [c K_h, k_rot]           v_h = c V_h                           (K_h and V_h are `kv_b_proj`)
    q_h = [x Q_h, rotate(x Q'_h)], or with norm(x A'') instead of x      (`q_proj`, or `q_b_proj` after `q_a_proj`)

With `attention_gate` the output of a head is multiplied by sigmoid(x g_h), one number (`g_proj`).

With `mla.scaled_latents`, both norms are followed by sqrt(D / width). Without `mla.latent_norm`, as Megatron without `--qk-layernorm`, both norms are the identity; without rotary positions, as
in Kimi Linear, so is `rotate`.

The projections from latents to heads are split over the tensor ranks by heads; those into latents are narrow, and whole
on every rank. Under sequence parallelism each rank computes the latents of its part of the sequence, and these are
all-gathered rather than x, which is several times wider; the backward sums the gradients of all ranks' heads.

A cache holds only c and k_rot. With it, attention is in the latent space, since (q_h, c K_h) = (q_h K_h^T, c): one key
[c, k_rot] and one value c serve all heads, and V_h is applied to the result.

Legend: B batch, S queries, T keys, D model width, H this rank's heads, n and r the parts of queries and keys without and
with rotation, e size of a value, c of the latent, q of the queries' latent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mega_common.model_config import ModelConfig
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.model.attention import AttentionCore
from mega_trainer.model.forward_context import ForwardContext, KVCache
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.lora_adapters import build_replicated_adapter
from mega_trainer.model.norms import Norm
from mega_trainer.model.rotary_embedding import yarn_mscale_factor
from mega_trainer.parallel.parallel_linear import ParallelLinearFunction
from mega_trainer.parallel.tensor_parallel import SplitHeads, gather_from_sequence_parallel_region


@dataclass(frozen=True)
class MlaProjections:
    """Projections of hidden states in multi-head latent attention (MLA), of the whole sequence.

    Attributes:
        q, q_rot: queries without and with rotation, [B, S, H, n] and [B, S, H, r].
        latent, k_rot: latent [B, S, c] and rotated part of keys [B, S, 1, r].
        gate: gates [B, S, H], or [B, S, 0] without.
        query_latent: latent of the queries [B, S, q], or None.
    """

    q: Tensor
    q_rot: Tensor
    latent: Tensor
    k_rot: Tensor
    gate: Tensor
    query_latent: Tensor | None


class MultiLatentAttention(nn.Module):
    """Multi-head latent attention (MLA, DeepSeek).
    It has low-rank projections of queries and of keys and values, attention and an output projection.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, mla, tp = build.config, build.config.mla, build.groups.tp
        assert mla is not None
        name, heads = f"model.layers.{layer}.self_attn", config.num_attention_heads
        self.mla, self.size = mla, config.query_key_head_dim
        self.linear, self.tp, self.sp = build.unsharded_linear, tp, build.sp
        self.query_channels = heads // tp.size * self.size
        self.core = AttentionCore(build, layer, scale=mla_score_scale(config))
        if mla.q_lora_rank is None:
            gate = [SplitHeads(f"{name}.g_proj", heads)] if config.attention_gate else []
            self.query = build.build_column_linear([SplitHeads(f"{name}.q_proj", heads, self.size), *gate], bias=False)
        else:
            self.query_latent = LatentProjection(
                build, f"{name}.q_a_proj", mla.q_lora_rank, f"{name}.q_a_layernorm", bias=config.qkv_bias
            )
            self.query_heads = build.build_column_weight(f"{name}.q_b_proj", heads * self.size, mla.q_lora_rank)
            self.query_adapter = build.build_column_weight_adapter(
                f"{name}.q_b_proj", heads * self.size, mla.q_lora_rank
            )
        self.latent = LatentProjection(
            build,
            f"{name}.kv_a_proj_with_mqa",
            mla.kv_lora_rank,
            f"{name}.kv_a_layernorm",
            mla.qk_rope_head_dim,
            bias=config.qkv_bias,
        )
        rows = mla.qk_nope_head_dim + mla.v_head_dim
        self.key_value_heads = build.build_column_weight(f"{name}.kv_b_proj", heads * rows, mla.kv_lora_rank)
        self.key_value_adapter = build.build_column_weight_adapter(f"{name}.kv_b_proj", heads * rows, mla.kv_lora_rank)
        self.out = build.build_row_linear(f"{name}.o_proj", heads * mla.v_head_dim, bias=config.attention_out_bias)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the output of multi-head latent attention, of an equal shape.
        S/T is the length under sequence parallelism.
        """
        parts = self.project_latents(x, context)
        if context.cache is None:
            y = self._attend(parts.q, parts.q_rot, parts.latent, parts.k_rot, context)
        else:
            y = self._attend_cached(parts.q, parts.q_rot, parts.latent.unsqueeze(-2), parts.k_rot, context.cache)
        if parts.gate.shape[-1]:
            y = y * parts.gate.sigmoid().unsqueeze(-1)
        out: Tensor = self.out(y.flatten(-2), context.dropout)
        return out

    def project_latents(self, x: Tensor, context: ForwardContext) -> MlaProjections:
        """Project hidden states to queries and latents, rotate their rotated parts, and scale the queries."""
        rotation = context.rotation_for_window(self.core.window)
        q, latent, k_rot, query_latent = self._project(x, context.dropout)
        q, gate = q[..., : self.query_channels], q[..., self.query_channels :]
        parts = [self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim]
        q, q_rot = torch.split(torch.unflatten(q, -1, (-1, self.size)), parts, -1)
        k_rot = k_rot.unsqueeze(-2)
        if rotation is not None:
            q_rot, k_rot = (self.core.kernels.apply_rotary(x, rotation) for x in (q_rot, k_rot))
        if context.query_scale is not None:
            q, q_rot = q * context.query_scale, q_rot * context.query_scale
        return MlaProjections(q, q_rot, latent, k_rot, gate, query_latent)

    def _project(self, x: Tensor, dropout: SeededDropout | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries [B, S, H (n + r)] and gates [B, S, H] in one tensor, latent [B, S, c] and shared key part
        [B, S, r] of the whole sequence, and the latent of the queries.
        """
        widths = [self.mla.kv_lora_rank, self.mla.qk_rope_head_dim]
        if self.mla.q_lora_rank is None:
            latent, k_rot = torch.split(
                gather_from_sequence_parallel_region(self.latent(x, dropout), self.tp, sp=self.sp), widths, -1
            )
            return self.query(x, dropout), latent, k_rot, None
        pair = [latent(x, dropout) for latent in (self.query_latent, self.latent)]
        joined = gather_from_sequence_parallel_region(torch.cat(pair, -1), self.tp, sp=self.sp)
        q, latent, k_rot = torch.split(joined, [self.mla.q_lora_rank, *widths], -1)
        y = self.linear(q, self.query_heads)
        if self.query_adapter is not None:
            y = self.query_adapter(q, y, self.query_heads, None, dropout)
        return y, latent, k_rot, q

    def _attend(self, q: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, context: ForwardContext) -> Tensor:
        """Attend with keys and values of every head: [B, S, H, e]."""
        k, v = self.expand_latent(latent, k_rot, context.dropout)
        y: Tensor = self.core(torch.cat([q, q_rot], -1), k, v, context)
        return y

    def expand_latent(self, latent: Tensor, k_rot: Tensor, dropout: SeededDropout | None) -> tuple[Tensor, Tensor]:
        """Return keys [B, S, H, n + r] and values [B, S, H, e], from the latent [B, S, c] and the keys' rotated part.
        The rotated part is [B, S, 1, r].
        """
        widths = [self.mla.qk_nope_head_dim, self.mla.v_head_dim]
        key_value = self.linear(latent, self.key_value_heads)
        if self.key_value_adapter is not None:
            key_value = self.key_value_adapter(latent, key_value, self.key_value_heads, None, dropout)
        k, v = torch.split(torch.unflatten(key_value, -1, (-1, sum(widths))), widths, -1)
        return torch.cat([k, k_rot.expand(-1, -1, k.shape[2], -1)], -1), v

    def _attend_cached(self, q: Tensor, q_rot: Tensor, latent: Tensor, k_rot: Tensor, cache: KVCache) -> Tensor:
        """Attend in the latent space over the whole cache: [B, S, H, e]."""
        # values as wide as keys, which fused kernels require; the part of the output from k_rot is dropped
        y = self.core.attend_with_cache(
            self.project_queries_to_latent(q, q_rot), torch.cat([latent, k_rot], -1), None, cache
        )
        return self.project_outputs_from_latent(y)

    def project_queries_to_latent(self, q: Tensor, q_rot: Tensor) -> Tensor:
        """Return the queries in the latent space [B, S, H, c + r], from their parts without and with rotation.
        Their keys are [c, k_rot].
        """
        return torch.cat([torch.einsum("bshn,hnc->bshc", q, self._head_matrices()[0]), q_rot], -1)

    def project_outputs_from_latent(self, y: Tensor) -> Tensor:
        """Return the output of heads [B, S, H, e], from the attention over latents [B, S, H, c or wider]."""
        return torch.einsum("bshc,hec->bshe", y[..., : self.mla.kv_lora_rank], self._head_matrices()[1])

    def _head_matrices(self) -> tuple[Tensor, ...]:
        widths = [self.mla.qk_nope_head_dim, self.mla.v_head_dim]
        return torch.split(torch.unflatten(self.key_value_heads, 0, (-1, sum(widths))), widths, 1)


class LatentProjection(nn.Module):
    """Down-projection x A to a latent (MLA's, or that of a low-rank gate), whole on every tensor rank.
    Its output has `width` columns, normalised if there is a `norm`, and then `extra` columns without norm.
    """

    def __init__(
        self, build: LayerBuilder, projection: str, width: int, norm: str = "", extra: int = 0, *, bias: bool = False
    ) -> None:
        super().__init__()
        config = build.config
        # never in fp8: small, and widths such as 576 are not multiples of fp8 block sizes
        self.linear, self.width = ParallelLinearFunction(build.kernels, build.deferred), width
        rows = width + extra
        self.weight = build.build_replicated(f"{projection}.weight", (rows, config.hidden_size), std=config.init_std)
        self.bias = build.build_replicated(f"{projection}.bias", (rows,)) if bias else None
        self.adapter = build_replicated_adapter(build, projection)
        self.norm, self.factor = None, 1.0
        if norm and (mla := config.mla) and mla.latent_norm:
            weight = build.build_replicated(f"{norm}.weight", (width,), fill=1.0)
            self.norm = Norm(build.kernels, weight, None, mla.norm_eps)
            self.factor = math.sqrt(config.hidden_size / width) if mla.scaled_latents else 1.0

    def forward(self, x: Tensor, dropout: SeededDropout | None = None) -> Tensor:
        """Map hidden states to the latent (`width` columns, normalised if there is a norm) and `extra` columns.
        [B, S or S/T, D] -> [B, S or S/T, width + extra] (S/T under sequence parallelism over T ranks).
        """
        y = self.linear(x, self.weight, self.bias)
        y = y if self.adapter is None else self.adapter(x, y, self.weight, self.bias, dropout)
        if self.norm is None:
            return y
        normed: Tensor = self.norm(y[..., : self.width])
        normed = normed if self.factor == 1 else normed * self.factor
        return normed if y.shape[-1] == self.width else torch.cat([normed, y[..., self.width :]], -1)


def mla_score_scale(config: ModelConfig) -> float:
    """Return the factor on MLA's attention scores: 1 / sqrt(query size) unless set, times any YaRN mscale squared.
    It is set by `attention_scale`; YaRN's factor applies if `rope.mscale_all_dim` is set.
    """
    scale = config.attention_scale or 1 / math.sqrt(config.query_key_head_dim)
    if config.rope.scaling == "yarn" and config.rope.mscale_all_dim:
        scale *= yarn_mscale_factor(config.rope, config.rope.mscale_all_dim) ** 2
    return scale
