"""Self-attention with grouped key/value heads (arXiv:2305.13245) and its core, heads split over the tensor ranks.

With fewer key/value heads than tensor ranks, consecutive ranks hold the same head, and its gradient is summed over them.

Legend: B batch, S sequence or queries, D model width, H query heads, K key/value heads, d size of queries and keys, e of
values. T is the number of tensor-parallel ranks, in `AttentionCore` the number of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.kernels.attention_masks import ALL, AttentionMaskSpec
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, Kernels
from mega_trainer.kernels.torch_kernels import reference_attention
from mega_trainer.model.feed_forward import apply_sigmoid_gate
from mega_trainer.model.forward_context import CacheAttentionFunction, ForwardContext, KVCache, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.norms import PlainNorm
from mega_trainer.model.relative_position_bias import BucketedPositionBias, PositionBias
from mega_trainer.parallel.context_parallel import LocalBlockwiseAttention, make_context_parallel_attention
from mega_trainer.parallel.tensor_parallel import SplitHeads


class AttentionCore(nn.Module):
    """Scaled dot-product attention of one layer's heads, with window, soft cap, sinks, dropout and context parallelism.

    Args:
        build: builder of the model.
        layer: number of the layer.
        scale: factor on the scores; default: 1 / sqrt(d).
        sinks: this rank's attention sinks [H], or None.
    """

    def __init__(
        self, build: LayerBuilder, layer: int, *, scale: float | None = None, sinks: nn.Parameter | None = None
    ) -> None:
        super().__init__()
        config, tp = build.config, build.groups.tp
        self.layer, self.saved, self.kernels = layer, build.saved, build.kernels
        self.window, self.dropout = config.get_attention_window(layer), config.attention_dropout
        self.scale, self.softcap = scale or 1 / math.sqrt(config.query_key_head_dim), config.attention_softcap
        self.sinks = sinks
        self.chunk = self.window if config.chunked_window else None
        self.first_head = tp.rank * config.num_attention_heads // tp.size
        self.cp_size = build.groups.cp.size
        self.context_parallel = make_context_parallel_attention(build.cp_kind, build.groups.cp, build.kernels)
        if (modify := build.functions.get("attention_scores")) is not None:
            self.kernels = cast(Kernels, ModifiedScoreKernels(build.kernels, modify, self.first_head))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        """Return the attention of queries to keys and values, appended to the KV cache if there is one: [batch, S, H, e].
        Shapes are q [batch, S, H, d], k [batch, T, K, d] and v [batch, T, K, e], with H query and K key/value heads.
        """
        if context.cache is not None:
            return self.attend_with_cache(q, k, v, context.cache, context.relative)
        context = context if self.chunk is None else context.with_attention_chunks(self.chunk, len(q))
        length, how, whole = q.shape[1] * self.cp_size, self.score_transform, partial(self._attend_whole, context)
        if context.relative is not None:
            how = context.relative.add_to_scores(how, length, length)
        if self.context_parallel is None:
            return whole(q, k, v, how, 0)
        assert isinstance(context.attention_mask, SequenceMask)  # context parallelism is only for training
        visible_parts = partial(context.attention_mask.list_mask_blocks, window=self.window)
        return self.context_parallel.compute_attention(q, k, v, how, visible_parts, whole)

    @property
    def score_transform(self) -> AttentionScoreTransform:
        """Transform of the attention scores before the softmax: scale, soft cap and sinks of this layer."""
        return AttentionScoreTransform(self.scale, self.softcap, self.sinks)

    def attend_with_cache(
        self, q: Tensor, k: Tensor, v: Tensor | None, cache: KVCache, relative: PositionBias | None = None
    ) -> Tensor:
        """Append keys and values to the KV cache, and return the attention of the queries to all cached keys.
        Queries, keys and values come from the tokens of this call.
        """
        return cache.update_and_attend(self.layer, q, k, v, self.window, self.bind_cached_attention(relative))

    def bind_cached_attention(self, relative: PositionBias | None = None) -> CacheAttentionFunction:
        """Return this layer's attention function for the KV cache, with its score transform and bias bound."""
        return CacheAttentionFunction(self.kernels, self.score_transform, relative, self.chunk is not None)

    def _attend_whole(
        self, context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, how: AttentionScoreTransform, first: int
    ) -> Tensor:
        """Attend over whole sequences with this rank's heads from number `first` on."""
        return self.saved.checkpoint_module("attention", self._attend, context, q, k, v, how, first)

    def _attend(
        self, context: ForwardContext, q: Tensor, k: Tensor, v: Tensor, how: AttentionScoreTransform, first: int
    ) -> Tensor:
        whole = context.attention_mask
        if isinstance(whole, SequenceMask) and whole.blocks_for_window(self.window):
            return LocalBlockwiseAttention.on_one_rank(self.kernels).compute_attention(
                q, k, v, how, partial(whole.list_mask_blocks, window=self.window)
            )
        mask = whole.mask_for_window(self.window)
        if context.dropout is not None and self.dropout:
            # not fused: fused kernels draw their own masks, which would depend on the layout
            first_head = self.first_head + first
            drop = partial(
                context.dropout.drop_attention_probs, p=self.dropout, layer=self.layer, first_head=first_head
            )
            return reference_attention(q, k, v, mask, how, drop)
        return self.kernels.attention(q, k, v, mask, how)


class ModifiedScoreKernels:
    """Kernel back end whose attention modifies the scores by an extension's function; the rest is another back end's.

    Attributes:
        kernels: the other back end.
        modify: function (scores, batch, head, query, key) -> scores, on tensors that broadcast.
        first_head: number of this rank's first head.
    """

    def __init__(self, kernels: Kernels, modify: Callable[..., Tensor], first_head: int) -> None:
        self.kernels, self.modify, self.first_head = kernels, modify, first_head

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the other back end."""
        return getattr(self.kernels, name)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | AttentionMaskSpec, how: AttentionScoreTransform
    ) -> Tensor:
        """Compute scaled dot-product attention, unfused, with the extension's modification of the scores."""

        def modify(scores: Tensor) -> Tensor:
            batch, heads, queries, keys = map(partial(torch.arange, device=scores.device), scores.shape)
            at = queries + (len(keys) - len(queries))  # the last query is at the last key
            heads, at = (heads + self.first_head)[:, None, None], at[:, None]
            return self.modify(scores, batch[:, None, None, None], heads, at, keys).to(scores.dtype)

        return reference_attention(q, k, v, mask, how, modify=modify)

    def decode_attention(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> Tensor:
        """Compute attention, with the modified scores, of one query per batch row in generation, row by row."""
        how, rows = AttentionScoreTransform(scale), []
        for query, key, value in zip(q, keys, values, strict=True):
            rows.append(self.attention(query[None, None], key.transpose(1, 2), value.transpose(1, 2), ALL, how)[0])
        return torch.cat(rows)

    def paged_attention(self, *_: Any) -> None:
        """Return None: rows are computed one by one, since no paged kernel modifies scores."""


class SelfAttention(nn.Module):
    """Self-attention layer: fused query-key-value projection, rotation, attention and output projection.

    With `attention_gate` the attention output is multiplied by the sigmoid of another projection, as in Qwen3-Next
    (arXiv:2505.06708).
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, tp = build.config, build.groups.tp
        name = f"model.layers.{layer}.self_attn"
        self.size, self.rotates = config.query_key_head_dim, config.has_rotary_positions(layer)
        self.heads = config.num_attention_heads // tp.size
        self.kv_heads = max(1, config.key_value_heads // tp.size)
        sinks = build.build_attention_sinks(f"{name}.sinks") if config.attention_sinks else None
        self.core = AttentionCore(build, layer, scale=config.attention_scale, sinks=sinks)
        own = config.position == "relative" and config.relative.every_layer
        self.relative = (
            LayerRelativePositionBias(build, f"{name}.relative_bias", causal=not config.is_encoder_layer(layer))
            if own
            else None
        )
        self.clip = config.qkv_clip
        self.gated, self.saved = config.attention_gate, build.saved
        self.norm_after_rope = config.qk_norm_after_rope
        self.scales_queries = config.rope.query_scaling is not None or bool(
            config.no_rope_scaling and layer in (config.no_rope_layers or ())
        )
        counts = {"g": config.num_attention_heads} if self.gated else {}  # first, so that q, k and v stay contiguous
        counts |= {"q": config.num_attention_heads, "k": config.key_value_heads, "v": config.key_value_heads}
        if config.keys_are_values:
            del counts["v"]
        self.parts = [self.heads, *[self.kv_heads] * (1 if config.keys_are_values else 2)]
        self.v_norm = PlainNorm(config.norm_eps) if config.value_norm else None
        blocks = [SplitHeads(f"{name}.{x}_proj", count, self.size) for x, count in counts.items()]
        self.qkv = build.build_column_linear(blocks, bias=config.qkv_bias)
        self.out = build.build_row_linear(
            f"{name}.o_proj", config.num_attention_heads * self.size, bias=config.attention_out_bias
        )
        self.out_norm = None
        if config.output_input_norms:
            self.out_norm = build.build_split_norm(f"{name}.o_norm", config.num_attention_heads, self.size)
        norms = config.qk_norm and (self.rotates or config.qk_norm_span != "plain")
        self.q_norm = build.build_qk_norm(f"{name}.q_norm", config.num_attention_heads) if norms else None
        self.k_norm = build.build_qk_norm(f"{name}.k_norm", config.key_value_heads) if norms else None

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the output of self-attention, of an equal shape.
        S/T is the length under sequence parallelism.
        """
        gate, qkv = None, self.qkv(x, context.dropout)
        qkv = qkv if self.clip is None else qkv.clamp(-self.clip, self.clip)
        if self.gated:
            gate, qkv = torch.tensor_split(qkv, [self.heads * self.size], -1)
        q, k, v = self._split_and_rotate(torch.unflatten(qkv, -1, (-1, self.size)), context)
        q = q * context.query_scale if self.scales_queries and context.query_scale is not None else q
        y = self.core(q, k, v, context if self.relative is None else self.relative.add_to_context(context))
        y = (y if self.out_norm is None else self.out_norm(y)).flatten(-2)
        out: Tensor = self.out(
            y if gate is None else self.saved.recompute_output("activation", apply_sigmoid_gate, y, gate),
            context.dropout,
        )
        return out

    def _split_and_rotate(self, qkv: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Split [B, S, H + 2K, d], or [B, S, H + K, d] if keys are values, into queries, keys and values, normalised and rotated."""
        rotation, kernels = context.rotation_for_window(self.core.window) if self.rotates else None, self.core.kernels
        if rotation is not None and self.q_norm is None and self.v_norm is None and len(self.parts) == 3:
            return kernels.apply_rotary_qkv(qkv, rotation, self.heads, self.kv_heads)
        q, k, *values = torch.split(qkv, self.parts, -2)
        v = values[0] if values else k
        if self.q_norm is not None and self.k_norm is not None and not self.norm_after_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = kernels.apply_rotary(q, rotation), kernels.apply_rotary(k, rotation)
        if self.q_norm is not None and self.k_norm is not None and self.norm_after_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v if self.v_norm is None else self.v_norm(v)


class EncodedPositionAttention(SelfAttention):
    """Self-attention layer whose queries and keys have the position encoding of an extension instead of a rotation."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__(build, layer)
        self.encode = build.functions["position"]

    def _split_and_rotate(self, qkv: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Split [B, S, H + 2K, d] into queries, keys and values, normalised and with the encoding."""
        q, k, v = super()._split_and_rotate(qkv, context)
        return *(self.encode(part, context.positions).to(v.dtype) for part in (q, k)), v


class LayerRelativePositionBias(nn.Module):
    """Relative position bias table that only one layer uses, not shared by all layers."""

    def __init__(self, build: LayerBuilder, name: str, *, causal: bool) -> None:
        super().__init__()
        self.config, self.causal, self.table = (
            build.config.relative,
            causal,
            build_relative_position_bias_table(build, name),
        )

    def add_to_context(self, context: ForwardContext) -> ForwardContext:
        """Return a copy of the forward context with this layer's relative position bias table."""
        return replace(context, relative=BucketedPositionBias(self.table, self.config, self.causal))


def build_relative_position_bias_table(build: LayerBuilder, name: str) -> nn.Parameter:
    """Build this tensor rank's heads [buckets, H/T] of a relative position bias table; `name` is without `.weight`."""
    rows, heads, tp = build.config.relative.buckets, build.config.num_attention_heads, build.groups.tp
    own = heads // tp.size
    piece = TensorPiece(f"{name}.weight", (rows, heads), (0, tp.rank * own), (0, 0), (rows, own))
    return build.build_parameter((rows, own), [piece], std=build.config.init_std)
