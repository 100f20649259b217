"""Attention of DeepSeek-V4: one shared key/value head with a sliding window, and entries that compress many tokens.

All layers have queries from a latent, one head that is both key and value, attention sinks, and a low-rank output projection:

    q_h = rotate(norm(norm(x A) B_h))    k = v = rotate(norm(x C))
    y_h = rotate^-1(attention(q_h, [k of the window, entries]))    out = concat_g(y_g O_g) P

where g are groups of heads. Only the last elements of a head are rotated; the inverse rotation of the output, at the query's
position, leaves relative positions. A layer of kind `swa` has no entries. In one of kind `hca` (heavily compressed attention),
each window of m tokens of a document has an entry, a gated mean of projections with a bias b of the position in the window,

    e_w = rotate(norm(sum_j softmax_j(x_j G + b_j) * x_j K))    at the position of the window's first token,

which later queries, and the window's last one, attend to. In one of kind `csa` (compressed sparse attention) a token has two such
projections, and an entry is over the second of its own window and the first of the window before. A lightning indexer with
narrower entries of its own selects the `top_k` entries of a query, by the scores of `sparse_attention`, without gradient.

Heads, groups and index heads are split over the tensor ranks; keys, entries and their projections are whole on each. Under
context parallelism of any kind the projections of all ranks are gathered, which are narrow, and a rank attends with its queries.
`COMPRESSED_QUERIES` queries at a time attend to the tokens of their windows and the entries that have ended; other pairs are
masked. A KV cache holds the projections of all tokens, and entries are computed again at each step, so it is larger than the
entries.

Legend: B batch, S sequence, s tokens of a context rank, W windows, m tokens of a window, H this rank's heads, G its groups,
h its index heads, d size of a head, c width of a token's projections, e width of an entry, D model width, T tensor ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_common.layer_kinds import COMPRESSED_QUERIES
from mega_trainer.distributed.device import to_device
from mega_trainer.kernels.attention_masks import (
    AttentionMaskSpec,
)
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, Kernels, RotaryAngles
from mega_trainer.model.forward_context import CacheAttentionFunction, ForwardContext, SequenceMask
from mega_trainer.model.latent_attention import LatentProjection
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.norms import Norm, PlainNorm
from mega_trainer.model.rotary_embedding import RotaryEmbedding
from mega_trainer.model.sparse_attention import PackedCacheAttention, score_index_keys, select_best_keys
from mega_trainer.parallel.context_parallel import gather_context_parallel_tokens, residual_stream_token_ranges
from mega_trainer.parallel.parallel_linear import ParallelLinearFunction
from mega_trainer.parallel.tensor_parallel import gather_from_sequence_parallel_region


@dataclass(frozen=True)
class SequenceTokens:
    """Tokens of whole sequences, with their documents and positions, and the indices of this rank's queries.

    Attributes:
        queries: ranges of the indices in the sequence of this rank's queries, in order.
        starts: int64 [B or 1, S], index of the first token of each token's document.
        positions: int64 [B or 1, S], positions of the tokens by which they are rotated.
    """

    queries: Sequence[range]
    starts: Tensor
    positions: Tensor

    @classmethod
    def of_one_document(cls, queries: int, length: int, device: torch.device) -> SequenceTokens:
        """Return one document of `length` tokens, of which the last `queries` are this rank's queries."""
        at = torch.arange(length, device=device)
        return cls([range(length - queries, length)], torch.zeros_like(at)[None], at[None])

    def windows_of(self, size: int) -> CompressionWindows:
        """Return the windows of `size` tokens of each document to be compressed, without an incomplete one at its end."""
        at = torch.arange(self.starts.shape[1], device=self.starts.device)
        first = (at - self.starts) % size == 0
        # the tokens at which windows begin and end in one document, in front; as many windows as the sequence can have
        ends = F.pad(self.starts, (0, size), value=-1)[:, size - 1 : size - 1 + len(at)]
        whole = first & (ends == self.starts)
        order = torch.sort((~whole).to(torch.int8), dim=1, stable=True).indices[:, : len(at) // size]
        return CompressionWindows(size, order, whole.gather(1, order))

    def split_queries(self, size: int) -> Iterator[tuple[slice, range]]:
        """Yield parts of at most `size` contiguous queries, as slices of this rank's queries and sequence indices."""
        before = 0
        for indices in self.queries:
            for first in range(0, len(indices), size):
                part = indices[first : first + size]
                yield slice(before + first, before + first + len(part)), part
            before += len(indices)

    def mask_window_keys(self, part: range, keys: range, window: int) -> Tensor:
        """Return the mask of the `keys` that the queries `part` attend to: those in their sliding window and document.
        It is bool [B or 1, n, keys] for n queries.
        """
        at = torch.arange(keys.start, keys.stop, device=self.starts.device)
        own = torch.arange(part.start, part.stop, device=self.starts.device)[:, None]
        return (at <= own) & (at > own - window) & (at >= self._starts_of(part))

    def mask_entries(self, part: range, windows: CompressionWindows, count: int) -> Tensor:
        """Return the mask of the first `count` compressed key/value entries that the queries `part` may attend to.
        They are those of windows that have ended in the query's document; bool [B or 1, n, `count`] for n queries.
        """
        begin, whole = windows.begin[:, None, :count], windows.whole[:, None, :count]
        own = torch.arange(part.start, part.stop, device=self.starts.device)[:, None]
        return (begin + windows.size <= own + 1) & (begin >= self._starts_of(part)) & whole

    def _starts_of(self, part: range) -> Tensor:
        return self.starts[:, part.start : part.stop, None]


@dataclass(frozen=True)
class CompressionWindows:
    """Windows of tokens that are compressed to one key/value entry each.

    Attributes:
        size: m.
        begin: int64 [B or 1, W], index of the first token of each window.
        whole: bool [B or 1, W], False for padding.
    """

    size: int
    begin: Tensor
    whole: Tensor

    def gather_tokens(self, x: Tensor, before: int = 0) -> Tensor:
        """Return x [B, S, c] at the tokens of all windows, or `before` tokens before each: [B, W, m, c]."""
        offsets = torch.arange(self.size, device=x.device) - before
        at = (self.begin.unsqueeze(-1) + offsets).clamp(0, x.shape[1] - 1).flatten(1)
        rows = x.gather(1, at.unsqueeze(-1).expand(len(x), -1, x.shape[-1]))
        return torch.unflatten(rows, 1, (-1, self.size))


class TokenCompressor(nn.Module):
    """Compressor of each window of tokens to one key/value entry, a gated mean of projections of its tokens.
    `size` is the width of an entry; with `overlap`, an entry is over two windows.
    """

    def __init__(self, build: LayerBuilder, name: str, size: int, rate: int, *, overlap: bool) -> None:
        super().__init__()
        config, self.size, self.rate, self.overlap = build.config, size, rate, overlap
        width, self.kernels = (1 + overlap) * size, build.kernels
        self.width = 2 * width  # of a token's projections
        self.linear = ParallelLinearFunction(build.kernels, build.deferred)
        self.value, self.gate = (
            build.build_replicated(f"{name}.{part}_proj.weight", (width, config.hidden_size), std=config.init_std)
            for part in ("kv", "gate")
        )
        # partial_grad: entries are whole on every tensor rank, and a rank's gradient is only from its own heads
        self.bias = build.build_replicated(f"{name}.position_bias", (rate, width), partial_grad=True)
        norm = build.build_replicated(f"{name}.kv_norm.weight", (size,), fill=1.0, partial_grad=True)
        self.norm = Norm(build.kernels, norm, None, config.norm_eps)
        self.rotary = RotaryEmbedding.from_model_config(config, config.rope)

    def project_tokens(self, x: Tensor) -> Tensor:
        """Return the values and gates of tokens x [B, s or s/T, D], side by side: [B, s or s/T, c]."""
        return torch.cat([self.linear(x, self.value), self.linear(x, self.gate)], -1)

    def forward(self, projected: Tensor, sequence: SequenceTokens) -> tuple[Tensor, CompressionWindows]:
        """Return the compressed key/value entries [B, W, e], one for each window of tokens, in order, and the windows.
        `projected` are the projections [B, S, c] of all tokens.
        """
        windows = sequence.windows_of(self.rate)
        if not windows.begin.shape[1]:
            return projected.new_zeros(len(projected), 0, self.size), windows
        value, gate = torch.chunk(projected, 2, -1)
        gate, bias = upcast_to_fp32(gate), upcast_to_fp32(self.bias)
        values, gates = (
            [windows.gather_tokens(value[..., -self.size :])],
            [windows.gather_tokens(gate[..., -self.size :])],
        )
        gates[0] = gates[0] + bias[:, -self.size :]
        if self.overlap:
            values.insert(0, windows.gather_tokens(value[..., : self.size], self.rate))
            earlier = windows.gather_tokens(gate[..., : self.size], self.rate) + bias[:, : self.size]
            first = windows.begin - self.rate < sequence.starts.gather(1, windows.begin)
            gates.insert(0, earlier.masked_fill(first[..., None, None], float("-inf")))
        weights = torch.cat(gates, 2).softmax(2).to(value.dtype)
        entries = self.norm((torch.cat(values, 2) * weights).sum(2))
        rows = max(len(windows.begin), len(sequence.positions))
        positions = sequence.positions.expand(rows, -1).gather(1, windows.begin.expand(rows, -1))
        angles = self.rotary.compute_rotation(positions, entries.dtype)
        return rotate_last_elements(self.kernels, entries.unsqueeze(2), angles).squeeze(2), windows


class EntryIndexer(nn.Module):
    """Lightning indexer of compressed entries: narrow index queries, head weights, and index entries of its own."""

    def __init__(self, build: LayerBuilder, name: str, rate: int) -> None:
        super().__init__()
        config, section = build.config, build.config.compressed
        assert section is not None
        assert section.indexer is not None
        self.config, self.kernels, self.tp = section.indexer, build.kernels, build.groups.tp
        heads, size = self.config.num_heads, self.config.head_dim
        self.linear = ParallelLinearFunction(build.kernels, build.deferred)  # never in fp8: selection is by its order
        self.compressor = TokenCompressor(build, name, size, rate, overlap=True)
        self.query = build.build_column_weight(f"{name}.q_b_proj", heads * size, section.q_lora_rank)
        self.head_weights = build.build_replicated(
            f"{name}.weights_proj.weight", (heads, config.hidden_size), std=config.init_std
        )

    @property
    def own_heads(self) -> int:
        """Number of index heads of this tensor rank."""
        return self.config.num_heads // self.tp.size

    def is_selective(self, length: int) -> bool:
        """Return whether `length` tokens have more compressed entries than a query selects (`top_k`); False if `dense`."""
        return not self.config.dense and length // self.compressor.rate > self.config.top_k

    def project_tokens(self, x: Tensor) -> Tensor:
        """Return the compressor's projections and the head weights of tokens x, side by side, in at least fp32.
        [B, s or s/T, D] -> [B, s or s/T, c + heads].
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = F.linear(x.to(wide), self.head_weights.to(wide)) * self.config.num_heads**-0.5
        return torch.cat([self.compressor.project_tokens(x).to(wide), weights], -1)

    def project_queries(self, latent: Tensor, rotation: RotaryAngles) -> Tensor:
        """Return the rotated index queries [B, s, h, d] from the latent of the queries [B, s, q]."""
        q = torch.unflatten(self.linear(latent, self.query), -1, (self.own_heads, -1))
        return rotate_last_elements(self.kernels, q, rotation)

    def own_head_weights(self, weights: Tensor) -> Tensor:
        """Return the columns [B, s, h] of head weights [B, s, heads] for this tensor rank's index heads."""
        return weights[..., self.tp.rank * self.own_heads : (self.tp.rank + 1) * self.own_heads]

    @torch.no_grad()
    def select(self, q: Tensor, weights: Tensor, entries: Tensor, seen: Tensor) -> Tensor:
        """Return the mask of the `top_k` best compressed entries for n queries, bool [B or 1, n, entries], among those `seen`.
        q is [B, n, h, d], weights are [B, n, h] and the index entries [B, entries, d].
        """
        if entries.shape[1] <= self.config.top_k:
            return seen
        scores = score_index_keys(q, weights, entries, self.config.head_dim, self.tp)
        return select_best_keys(scores, seen, self.config.top_k)


class CompressedAttention(nn.Module):
    """Attention of a DeepSeek-V4 layer: in a sliding window of one shared key/value head, and to compressed entries."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        config, section, tp = build.config, build.config.compressed, build.groups.tp
        assert section is not None
        name, heads, self.kind = (
            f"model.layers.{layer}.self_attn",
            config.num_attention_heads,
            config.get_mixer_kind(layer),
        )
        self.layer, self.window, self.size = layer, section.window, config.query_key_head_dim
        self.kernels, self.saved, self.linear = build.kernels, build.saved, build.unsharded_linear
        self.tp, self.cp, self.sp, self.groups = tp, build.groups.cp, build.sp, section.output_groups // tp.size
        self.chunk = COMPRESSED_QUERIES
        self.scale, rank, eps = config.attention_scale or 1 / math.sqrt(self.size), section.q_lora_rank, config.norm_eps
        self.query_latent, self.key = (
            LatentProjection(build, f"{name}.q_a_proj", rank),
            LatentProjection(build, f"{name}.kv_proj", self.size),
        )
        self.query_latent_norm, self.key_norm = (
            Norm(build.kernels, build.build_replicated(f"{name}.{part}_norm.weight", (width,), fill=1.0), None, eps)
            for part, width in (("q_a", rank), ("kv", self.size))
        )
        self.query_heads = build.build_column_weight(f"{name}.q_b_proj", heads * self.size, rank)
        self.query_adapter = build.build_column_weight_adapter(f"{name}.q_b_proj", heads * self.size, rank)
        self.query_norm = PlainNorm(eps)
        self.sinks = build.build_attention_sinks(f"{name}.sinks")
        self.compressor = self.indexer = None
        if self.kind != "swa":
            rate, overlap = (section.csa_rate, True) if self.kind == "csa" else (section.hca_rate, False)
            self.compressor = TokenCompressor(build, f"{name}.compressor", self.size, rate, overlap=overlap)
        if self.kind == "csa":
            self.indexer = EntryIndexer(build, f"{name}.indexer", section.csa_rate)
        joined = section.output_groups * section.output_rank
        self.group_out = build.build_column_weight(
            f"{name}.o_a_proj", joined, heads * self.size // section.output_groups
        )
        self.out = build.build_row_linear(f"{name}.o_b_proj", joined, bias=False)

    @property
    def score_transform(self) -> AttentionScoreTransform:
        """Transform of the attention scores before the softmax: scale and sinks."""
        return AttentionScoreTransform(self.scale, sinks=self.sinks)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, s or s/T, D] to the output of attention, of an equal shape.
        s/T is the length under sequence parallelism over T ranks.
        """
        rotation = context.local_rotation if self.kind == "swa" else context.rotation
        assert rotation is not None
        latent, key, projected = self._project(x, context)
        q = self.linear(latent, self.query_heads)
        if self.query_adapter is not None:
            q = self.query_adapter(latent, q, self.query_heads, None, context.dropout)
        q = rotate_last_elements(self.kernels, self.query_norm(torch.unflatten(q, -1, (-1, self.size))), rotation)
        key = rotate_last_elements(self.kernels, key.unsqueeze(2), rotation)
        index: tuple[Tensor, ...] = ()
        if self.indexer is not None and (context.cache or self.indexer.is_selective(q.shape[1] * self.cp.size)):
            with torch.no_grad():
                narrow = gather_from_sequence_parallel_region(self.indexer.project_tokens(x), self.tp, sp=self.sp)
                tokens, weights = torch.split(
                    narrow, [self.indexer.compressor.width, self.indexer.config.num_heads], -1
                )
                weights = self.indexer.own_head_weights(weights)
                index = (self.indexer.project_queries(latent, rotation), weights, tokens.to(x.dtype))
        if context.cache is None:
            y = self.saved.checkpoint_module("attention", self._attend, context, q, key, projected, *index)
        else:
            y = self._attend_cached(context, q, key, projected, *index)
        y = rotate_last_elements(self.kernels, y, replace(rotation, sin=-rotation.sin), back=True)
        grouped = torch.unflatten(y.flatten(-2), -1, (self.groups, -1))
        weight = self.group_out.view(self.groups, -1, grouped.shape[-1])
        out: Tensor = self.out(torch.einsum("bsgi,goi->bsgo", grouped, weight).flatten(-2), context.dropout)
        return out

    def _project(self, x: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Return the latent of the queries [B, s, q], keys [B, s, d] and the compressor's projections [B, s, c]."""
        latent = self.query_latent_norm(self.query_latent(x, context.dropout))
        parts = [latent, self.key_norm(self.key(x, context.dropout))]
        parts += [self.compressor.project_tokens(x)] if self.compressor is not None else [x[..., :0]]
        joined = gather_from_sequence_parallel_region(torch.cat(parts, -1), self.tp, sp=self.sp)
        latent, key, projected = torch.split(joined, [part.shape[-1] for part in parts], -1)
        return latent, key, projected

    def _attend(self, context: ForwardContext, q: Tensor, key: Tensor, projected: Tensor, *index: Tensor) -> Tensor:
        """Attend with this rank's queries to the tokens and entries of the whole sequence: [B, s, H, d]."""
        key = gather_context_parallel_tokens(key.squeeze(2), self.cp)
        projected = projected if self.compressor is None else gather_context_parallel_tokens(projected, self.cp)
        index = (*index[:2], *(gather_context_parallel_tokens(part, self.cp) for part in index[2:]))
        return self.attend_to_tokens(
            q, key, projected, self._describe_sequence(context, key.shape[1], key.device), *index
        )

    def _describe_sequence(self, context: ForwardContext, length: int, device: torch.device) -> SequenceTokens:
        mask, positions = context.attention_mask, context.positions
        assert isinstance(mask, SequenceMask)
        assert positions is not None
        zeros = torch.zeros(1, length, dtype=torch.int64)
        starts = zeros if mask.document_starts is None else torch.from_numpy(mask.document_starts).long()
        queries = residual_stream_token_ranges(length, self.cp, self.tp, sp=False)
        whole = gather_context_parallel_tokens(positions.unsqueeze(-1), self.cp).squeeze(-1)
        return SequenceTokens(queries, to_device(starts, device), whole)

    def attend_to_tokens(
        self, q: Tensor, key: Tensor, projected: Tensor, sequence: SequenceTokens, *index: Tensor
    ) -> Tensor:
        """Attend with queries [B, s, H, d] to keys [B, S, d] in the window and entries compressed from `projected` [B, S, c].
        `index` are index queries, their weights and the indexer's projections of tokens, of a layer with an indexer.
        """
        compressed = None if self.compressor is None else self.compressor(projected, sequence)
        index_entries = None
        if self.indexer is not None and self.indexer.is_selective(key.shape[1]):
            with torch.no_grad():
                index_entries, _ = self.indexer.compressor(index[2], sequence)
        outputs = []
        for own, part in sequence.split_queries(self.chunk):
            keys = range(max(0, part.start + 1 - self.window), part.stop)
            seen, visible = sequence.mask_window_keys(part, keys, self.window), key[:, keys.start : keys.stop]
            if compressed is not None:
                entries, windows = compressed
                count = part.stop // windows.size  # of windows that have ended
                ended = sequence.mask_entries(part, windows, count)
                if self.indexer is not None and index_entries is not None:
                    ended = self.indexer.select(index[0][:, own], index[1][:, own], index_entries[:, :count], ended)
                rows = max(len(seen), len(ended))
                seen = torch.cat([seen.expand(rows, -1, -1), ended.expand(rows, -1, -1)], -1)
                visible = torch.cat([visible, entries[:, :count]], 1)
            visible = visible.unsqueeze(2)
            outputs.append(self.kernels.attention(q[:, own], visible, visible, seen.unsqueeze(1), self.score_transform))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)

    def _attend_cached(
        self, context: ForwardContext, q: Tensor, key: Tensor, projected: Tensor, *index: Tensor
    ) -> Tensor:
        """Attend to the tokens and entries of the cache, which holds the projections of all tokens: [B, S, H, d]."""
        assert context.cache is not None
        if self.compressor is None:
            attend = CacheAttentionFunction(self.kernels, self.score_transform)
            return context.cache.update_and_attend(self.layer, q, key, None, self.window, attend)
        wide = torch.promote_types(q.dtype, torch.float32) if index else q.dtype
        packed = torch.cat([part.to(wide).flatten(2) for part in (q, *index[:2])], -1).unsqueeze(2)
        keys = torch.cat([key.squeeze(2), projected, *index[2:]], -1).unsqueeze(2)
        attend = CompressedCacheAttention(self.kernels, self.score_transform, None, False, self, q.shape[2])
        return context.cache.update_and_attend(self.layer, packed, keys, None, None, attend)


@dataclass(frozen=True)
class CompressedCacheAttention(PackedCacheAttention):
    """Attention function for the KV cache that attends to cached tokens in a window and to entries compressed from them.

    A query [1, w] is a token's queries of all heads, its index queries and their weights, one after the other; a key [1, w'] is a
    token's key, its projections and those of the indexer.
    """

    mixer: CompressedAttention | None = None
    heads: int = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec) -> Tensor:
        """Compute the attention of packed queries [B, S, 1, w] to packed keys of all tokens [B, T, 1, w']: [B, S, H, d]."""
        mixer = self.mixer
        assert mixer is not None
        assert mixer.compressor is not None
        sequence = SequenceTokens.of_one_document(q.shape[1], k.shape[1], q.device)
        indexer, widths, key_widths = mixer.indexer, [self.heads * mixer.size], [mixer.size, mixer.compressor.width]
        if indexer is not None:
            widths += [indexer.own_heads * indexer.config.head_dim, indexer.own_heads]
            key_widths.append(indexer.compressor.width)
        main, *queries = torch.split(q.squeeze(2), widths, -1)
        key, projected, *tokens = torch.split(k.squeeze(2), key_widths, -1)
        index = []
        if indexer is not None:
            index = [torch.unflatten(queries[0], -1, (indexer.own_heads, -1)), queries[1], tokens[0]]
        main = torch.unflatten(main, -1, (self.heads, -1)).to(key.dtype)
        return mixer.attend_to_tokens(main, key, projected, sequence, *index)


def rotate_last_elements(kernels: Kernels, x: Tensor, angles: RotaryAngles, *, back: bool = False) -> Tensor:
    """Apply rotary angles to the last elements of each head of x [B, S, H, d], as many as the angles cover.
    Rotated pairs of neighbors become halves; `back` takes halves, and returns pairs of neighbors.
    """
    rotated = 2 * angles.cos.shape[-1]
    rest, last = torch.split(x, [x.shape[-1] - rotated, rotated], -1)
    last = kernels.apply_rotary(last, replace(angles, interleaved=False) if back else angles)
    if back and angles.interleaved:
        last = torch.unflatten(last, -1, (2, -1)).mT.flatten(-2)
    return torch.cat([rest, last], -1)
