"""Shared state of the layers in one forward pass: positions, attention mask, KV cache, dropout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from mega_trainer.data.batch_images import ImageBlock, mask_later_in_block
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.device import to_device
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.kernels.attention_masks import AttentionMaskSpec, BandMask, MaskPart, PackedMask, rectangle_mask_part
from mega_trainer.kernels.kernel_interface import RotaryAngles
from mega_trainer.model.kv_cache import KVCache
from mega_trainer.model.relative_position_bias import PositionBias
from mega_trainer.parallel.context_parallel import rank_token_indices
from mega_trainer.parallel.expert_routing import RoutingReplay, StepRouting

if TYPE_CHECKING:
    from mega_trainer.model.cross_attention import EncoderContext


class AttentionMask(Protocol):
    """Interface of attention masks over the tokens of a forward pass."""

    def mask_for_window(self, window: int | None) -> Tensor | AttentionMaskSpec:
        """Return the mask of a layer whose queries attend to at most `window` keys.

        A tensor is boolean, [B or 1, 1, S, T].
        """


@dataclass(frozen=True)
class SequenceMask:
    """Attention mask of whole sequences: causal or bidirectional, and optionally restricted to documents.

    Under context parallelism it covers the sequences of all ranks; `mask_between` returns the mask of a part.

    Attributes:
        length: S.
        document_starts, bidirectional_blocks: as in `mega_trainer.data.micro_batch.SequenceBounds`. `mask_for_window`
            ignores the blocks; `mask_between` includes them.
    """

    length: int
    device: torch.device
    document_starts: np.ndarray | None = None
    causal: bool = True
    bidirectional_blocks: Sequence[ImageBlock] = ()
    _masks: dict[tuple[range, int | None], AttentionMaskSpec] = field(default_factory=dict)
    _preceding: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def mask_for_window(self, window: int | None) -> AttentionMaskSpec:
        """Return the mask of all queries and keys, of which a query attends to at most `window`; see `AttentionMask`."""
        return self._square(range(self.length), window)

    def mask_between(self, queries: range, keys: range, window: int | None) -> list[MaskPart]:
        """Return the mask for a range of queries and a range of keys, in parts; the ranges are equal or do not overlap."""
        if queries == keys:
            return [
                MaskPart(slice(None), queries, keys, self._square(queries, window)),
                *mask_later_in_block(self.bidirectional_blocks, queries, keys),
            ]
        if self.causal and keys.start > queries.start:
            return mask_later_in_block(self.bidirectional_blocks, queries, keys)
        band = self._band(window)
        if self.document_starts is None:
            parts = [rectangle_mask_part(slice(None), queries, keys, band)]
        else:
            early, late = sorted((queries, keys), key=lambda indices: indices.start)
            # only one document can reach from the early range into the late one: that of the late range's first token
            shared = (self.document_starts[:, late.start : late.stop] < early.stop).sum(1).tolist()
            starts = self.document_starts[:, late.start].tolist()
            parts = []
            for row, (n, start) in enumerate(zip(shared, starts, strict=True)):
                pair = early[max(0, start - early.start) :], late[:n]
                row_queries, row_keys = pair if early is queries else pair[::-1]
                parts += [rectangle_mask_part(slice(row, row + 1), row_queries, row_keys, band)] if n else []
        return [part for part in parts if part is not None]

    def _band(self, window: int | None) -> BandMask:
        """Return the band that a query attends to."""
        left = None if window is None else window - 1
        return BandMask(left, 0 if self.causal else left)

    def count_preceding_tokens(self, group: CommGroup) -> Tensor | None:
        """Return, for each token of this rank in the context-parallel `group`, the number of earlier tokens in its
        document: int64 [B, s].

        None without document bounds: all earlier tokens.
        """
        if self.document_starts is None:
            return None
        share = group.size, group.rank  # layers that exchange heads have whole sequences, others parts
        if share not in self._preceding:
            indices = rank_token_indices(self.length, group)
            counts = indices - torch.from_numpy(self.document_starts)[:, indices]
            self._preceding[share] = to_device(counts, self.device)
        return self._preceding[share]

    @cached_property
    def cu_seqlens(self) -> tuple[Tensor, Tensor] | None:
        """Starts of all documents, in the batch rows one after another, and the end: int64 [documents + 1], on device
        and host; None without documents.

        None without document bounds.
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
                mask = PackedMask.from_lengths(lengths.tolist(), band, self.device)
            self._masks[indices, window] = mask
        return self._masks[indices, window]


@dataclass(frozen=True)
class ForwardContext:
    """State shared by all layers of one forward pass: attention mask, rotary angles, KV cache, dropout and expert
    routing.

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
    """

    attention_mask: AttentionMask
    rotation: RotaryAngles | None = None
    local_rotation: RotaryAngles | None = None
    cache: KVCache | None = None
    dropout: SeededDropout | None = None
    routing: StepRouting | None = None
    relative: PositionBias | None = None
    source: EncoderContext | None = None
    routes: RoutingReplay | None = None
    query_scale: Tensor | None = None

    def rotation_for_window(self, window: int | None) -> RotaryAngles | None:
        """Return the rotary angles of a layer whose queries attend to `window` keys, or to all."""
        return self.rotation if window is None else self.local_rotation
