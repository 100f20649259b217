"""Shared state of the layers in one forward pass: positions, attention mask, KV cache, encoder outputs, dropout.

Legend: B batch, S queries, T keys, H query heads, K key/value heads, d size of queries and keys, e of values.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mega_trainer.data.batch_images import BatchImages, ImageBlock, make_image_block_masks
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.device import to_device
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.kernels.attention_masks import (
    ALL,
    AttentionMaskBlock,
    AttentionMaskSpec,
    BandMask,
    PackedDocumentMask,
    PagedAttentionName,
    VisiblePagedKeys,
    make_rectangle_mask_block,
)
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform, Kernels, RotaryAngles
from mega_trainer.kernels.paged_attention import choose_paged_attention, supports_paged_attention
from mega_trainer.model.relative_position_bias import PositionBias
from mega_trainer.parallel.context_parallel import get_context_rank_token_indices
from mega_trainer.parallel.expert_routing import MicroBatchRouting, RoutingReplay

# A layer's attention: (queries [B, S, H, d], keys [B, T, K, d], values [B, T, K, e], mask) -> [B, S, H, e].
AttendFunction = Callable[[Tensor, Tensor, Tensor, AttentionMaskSpec], Tensor]
# A layer's recurrence: (next tokens of some sequences [R, S, c], their states [R, ..] or None) -> ([R, S, e], new states).
RecurrenceFunction = Callable[[Tensor, Sequence[Tensor] | None], tuple[Tensor, Sequence[Tensor]]]


@dataclass(frozen=True)
class CacheAttentionFunction:
    """Attention function of one layer for the KV cache, with its score transform and relative position bias.
    `chunked`: the layer's window is a chunk and does not slide.
    """

    kernels: Kernels
    how: AttentionScoreTransform
    relative: PositionBias | None = None
    chunked: bool = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMaskSpec) -> Tensor:
        """Compute the layer's attention of q to cached k and v; see `Kernels.attention`."""
        how = self.how if self.relative is None else self.relative.add_to_scores(self.how, q.shape[1], k.shape[1])
        return self.kernels.attention(q, k, v, mask, how)

    def decode_attention(self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Compute the layer's attention of one query per batch row to all cached keys of that row, in generation."""
        if self.relative is None and not self.how.has_unfused_terms:
            return self.kernels.decode_attention(q, keys, values, self.how.scale)
        rows = zip(q[:, None, None], keys, values, strict=True)
        return torch.cat([self(row, k.transpose(1, 2), v.transpose(1, 2), ALL) for row, k, v in rows]).squeeze(1)

    def paged_attention(
        self, q: Tensor, keys: Tensor, values: Tensor, rows: VisiblePagedKeys, name: PagedAttentionName | None
    ) -> Tensor | None:
        """Return the layer's attention of one query per row to a paged KV cache in one call, or None to go row by row.

        Args:
            name: implementation to use for the calls that it supports; None: the fastest.

        Returns:
            The output [N, H, e], or None for `rows`: `decode_attention` is to be called.
        """
        how = self.how if self.relative is None else self.relative.add_to_scores(self.how, 1, rows.longest)
        if name is None or not supports_paged_attention(name, q, keys, values, rows, how):
            name = choose_paged_attention(q, keys, values, rows, how)
        return None if name == "rows" else self.kernels.paged_attention(q, keys, values, rows, how, name)


class KVCache(Protocol):
    """Interface of a cache of earlier tokens for generation.
    The cache has keys and values, MLA latents, or recurrent states of each layer.
    """

    def update_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, window: int | None, attend: CacheAttentionFunction
    ) -> Tensor:
        """Append keys and values (v None: the keys) to a layer's cache, and attend to at most `window` cached keys per query.
        k, v and q belong to the tokens of this call.

        q [B, S, H, d], k [B, S, K, d] and v [B, S, K, e] -> [B, S, H, e]; without v the keys are also the values.
        """

    def cross_attend(self, layer: int, q: Tensor, attend: AttendFunction) -> Tensor:
        """Attend from this call's queries [B, S, H, d] to the cached encoder keys and values: [B, S, H, d]."""

    def update_and_recur(self, layer: int, x: Tensor, step: RecurrenceFunction, name: str = "") -> Tensor:
        """Advance a layer's cached recurrent states by the next tokens, and return the outputs [B, S, e].
        Call `step` with this call's tokens x [B, S, c] and the layer's cached recurrent states of this name, and store the
        new states.
        """


class AttentionMask(Protocol):
    """Interface of attention masks over the tokens of a forward pass."""

    def mask_for_window(self, window: int | None) -> Tensor | AttentionMaskSpec:
        """Return the attention mask of a layer whose queries attend to keys less than `window` positions away (None: to all).

        A tensor is boolean, [B or 1, 1, S, T].
        """


@dataclass(frozen=True)
class SequenceMask:
    """Attention mask of whole sequences: causal or bidirectional, and optionally restricted to documents.

    Under context parallelism it covers the sequences of all ranks; `list_mask_blocks` returns the mask of a part.

    Attributes:
        length: S.
        document_starts, bidirectional_blocks: as in `mega_trainer.data.micro_batch.DocumentBounds`. `mask_for_window`
            ignores the blocks; `list_mask_blocks` includes them.
        blocks_in_windows: the blocks are bidirectional only in layers with a sliding window.
    """

    length: int
    device: torch.device
    document_starts: np.ndarray | None = None
    causal: bool = True
    bidirectional_blocks: Sequence[ImageBlock] = ()
    blocks_in_windows: bool = False
    _masks: dict[tuple[range, int | None], AttentionMaskSpec] = field(default_factory=dict)
    _preceding: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _chunked: dict[int, SequenceMask] = field(default_factory=dict)

    def cut_into_chunks(self, size: int, rows: int) -> SequenceMask:
        """Return this mask without image blocks, with the documents of `rows` sequences cut to `size` tokens each (Llama 4)."""
        if size not in self._chunked:
            positions = np.arange(self.length)
            starts = np.zeros((rows, self.length), int) if self.document_starts is None else self.document_starts
            starts = positions - (positions - starts) % size
            self._chunked[size] = SequenceMask(self.length, self.device, starts, self.causal)
        return self._chunked[size]

    def mask_for_window(self, window: int | None) -> AttentionMaskSpec:
        """Return the mask over all tokens of keys less than `window` positions away (None: no limit), without image blocks."""
        return self._square(range(self.length), window)

    def blocks_for_window(self, window: int | None) -> Sequence[ImageBlock]:
        """Return the bidirectional image blocks of a layer with a sliding window, or with full attention (None)."""
        return () if self.blocks_in_windows and window is None else self.bidirectional_blocks

    def list_mask_blocks(self, queries: range, keys: range, window: int | None) -> list[AttentionMaskBlock]:
        """Return the attention mask for a range of queries and a range of keys as a list of masked rectangles.
        The ranges are equal or do not overlap.
        """
        if queries == keys:
            return [
                AttentionMaskBlock(slice(None), queries, keys, self._square(queries, window)),
                *make_image_block_masks(self.blocks_for_window(window), queries, keys),
            ]
        if self.causal and keys.start > queries.start:
            return make_image_block_masks(self.blocks_for_window(window), queries, keys)
        band = self._band(window)
        if self.document_starts is None:
            parts = [make_rectangle_mask_block(slice(None), queries, keys, band)]
        else:
            early, late = sorted((queries, keys), key=lambda indices: indices.start)
            # only one document can reach from the early range into the late one: that of the late range's first token
            shared = (self.document_starts[:, late.start : late.stop] < early.stop).sum(1).tolist()
            starts = self.document_starts[:, late.start].tolist()
            parts = []
            for row, (n, start) in enumerate(zip(shared, starts, strict=True)):
                pair = early[max(0, start - early.start) :], late[:n]
                row_queries, row_keys = pair if early is queries else pair[::-1]
                parts += [make_rectangle_mask_block(slice(row, row + 1), row_queries, row_keys, band)] if n else []
        return [part for part in parts if part is not None]

    def _band(self, window: int | None) -> BandMask:
        """Return the band that a query attends to."""
        left = None if window is None else window - 1
        return BandMask(left, 0 if self.causal else left)

    def count_preceding_tokens(self, group: CommGroup) -> Tensor | None:
        """Return the number of earlier tokens of the same document for each token of this rank; None without documents.
        They are int64 [B, s] for a context-parallel rank of `group`.
        """
        if self.document_starts is None:
            return None
        share = group.size, group.rank  # layers that exchange heads have whole sequences, others parts
        if share not in self._preceding:
            indices = get_context_rank_token_indices(self.length, group)
            counts = indices - torch.from_numpy(self.document_starts)[:, indices]
            self._preceding[share] = to_device(counts, self.device)
        return self._preceding[share]

    @cached_property
    def cu_seqlens(self) -> tuple[Tensor, Tensor] | None:
        """Starts of all documents and the end of the last (cu_seqlens), on device and host, or None without documents.
        They are int64 [documents + 1] and count the tokens of the batch rows one after another.
        """
        if self.document_starts is None:
            return None
        new = np.flatnonzero(self.document_starts == np.arange(self.document_starts.shape[1]))
        host = torch.from_numpy(np.append(new, self.document_starts.size))
        return to_device(host, self.device), host

    def _square(self, indices: range, window: int | None) -> AttentionMaskSpec:
        """Return the mask of a range of tokens to itself, cached."""
        if (indices, window) not in self._masks:
            band = self._band(None if window is None or window >= len(indices) else window)
            mask: AttentionMaskSpec = band
            if self.document_starts is not None:
                begins = np.maximum(self.document_starts[:, indices.start : indices.stop], indices.start)
                starts = [np.flatnonzero(np.diff(row, prepend=-1)) for row in begins]
                lengths = np.concatenate([np.diff(row, append=len(indices)) for row in starts])
                mask = PackedDocumentMask.from_lengths(lengths.tolist(), band, self.device)
            self._masks[indices, window] = mask
        return self._masks[indices, window]


@dataclass(frozen=True)
class ForwardContext:
    """State shared by all layers of one forward pass: attention mask, rotary angles, KV cache, dropout, expert routing.

    Attributes:
        attention_mask: attention mask over the tokens.
        rotation, local_rotation: rotary angles of layers without and with a sliding window, or None.
        cache: KV cache, or None.
        dropout: the micro-batch's dropout, or None outside training.
        routing: routing state of the training step, or None outside training.
        relative: relative position bias that layers share, or None.
        source: encoder side of a decoder with cross attention, or None.
        routes: rollout routing replay (R3) of given or recorded experts, or None.
        query_scale: factor of each token's query [B or 1, S, 1, 1], or None.
        positions: positions of the tokens int64 [B or 1, S] for the position encoding of an extension or
            compressed attention, or None.
        tokens: token ids int64 [B, S] of a model whose layers choose experts by them, or None.
        layer_inputs: input of each layer [B, S or S/T, width], or None.
        key_values: {window: (layer, keys, values)} of the layers whose keys and values later layers share.
        images: images with computed features, of which some are added to the outputs of the first layers; else None.
    """

    attention_mask: AttentionMask
    rotation: RotaryAngles | None = None
    local_rotation: RotaryAngles | None = None
    cache: KVCache | None = None
    dropout: SeededDropout | None = None
    routing: MicroBatchRouting | None = None
    relative: PositionBias | None = None
    source: EncoderContext | None = None
    routes: RoutingReplay | None = None
    query_scale: Tensor | None = None
    positions: Tensor | None = None
    tokens: Tensor | None = None
    images: BatchImages | None = None
    layer_inputs: Sequence[Tensor] | None = None
    # no dict: FSDP copies one that has tensors for each unit, so that later layers would miss what a layer adds
    key_values: UserDict[int | None, tuple[int, Tensor, Tensor]] = field(default_factory=UserDict)

    def with_attention_chunks(self, size: int, rows: int) -> ForwardContext:
        """Return a copy of the context whose mask limits attention to chunks of `size` tokens of each document.
        The batch has `rows` rows.
        """
        assert isinstance(self.attention_mask, SequenceMask)
        return replace(self, attention_mask=self.attention_mask.cut_into_chunks(size, rows))

    def rotation_for_window(self, window: int | None) -> RotaryAngles | None:
        """Return the rotary angles of a layer with a sliding window of `window` keys, or with full attention (None)."""
        return self.rotation if window is None else self.local_rotation


@dataclass(frozen=True)
class EncoderContext:
    """Encoder side of one forward pass, for cross attention.
    It has the data that a decoder layer's cross attention needs about the encoder's outputs.

    Attributes:
        context: forward context of the encoder's layers.
        length: encoder tokens in this rank's residual stream.
        attention_mask: bool [B, 1, 1, E], False for padding, context ranks concatenated; None: no padding.
        memory: the encoder's output [B, length, D], once computed; for neighbors, first its input.
        chunks: chunks of the queries that attend to parts of the memory; None: all attend to all of it.
    """

    context: ForwardContext
    length: int
    attention_mask: Tensor | None = None
    memory: Tensor | None = None
    chunks: CrossAttentionChunks | None = None


def with_encoder_memory(context: ForwardContext, memory: Tensor) -> ForwardContext:
    """Return a copy of the forward context in which cross attention attends to given encoder outputs.
    `memory` are the outputs, [batch, encoder tokens, D].
    """
    assert context.source is not None
    return replace(context, source=replace(context.source, memory=memory))


@dataclass(frozen=True)
class CrossAttentionChunks:
    """Chunked cross attention, as in Retro: each chunk of queries attends to its own equal part of the keys.

    Attributes:
        count: number of chunks of all rows together.
        samples: sample number of each chunk, for its dropout.
        shift: number of queries before the first chunk. They attend to no keys; the last chunk has as many fewer queries.
        some: [count, 1, 1, 1], or for each of the m queries [count, m, 1, 1]: 0 for queries without keys, else 1; None:
            all queries have keys.
    """

    count: int
    samples: Sequence[int]
    shift: int = 0
    some: Tensor | None = None

    def attend_chunks(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attend from each chunk of queries to its chunk of keys, in one call of `attend`; 0 for queries without keys.
        The tensors q [.., S, H, d], k and v [.., T, K, d] are cut into `count` chunks in order. The result has q's shape.
        """
        ahead = F.pad(q, (0, 0, 0, 0, -self.shift, self.shift))
        y = attend(*(t.reshape(self.count, -1, *t.shape[2:]) for t in (ahead, k, v)))
        y = y if self.some is None else y * self.some
        return F.pad(y.reshape(q.shape), (0, 0, 0, 0, self.shift, -self.shift))
