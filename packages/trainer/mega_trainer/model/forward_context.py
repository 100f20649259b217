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
from mega_trainer.model.relative_position_bias import RelativePositionBias
from mega_trainer.parallel.context_parallel import rank_token_indices
from mega_trainer.parallel.expert_routing import RoutingReplay, StepRouting

if TYPE_CHECKING:
    from mega_trainer.model.cross_attention import EncoderContext


class AttentionMask(Protocol):
    """Interface of attention masks over the tokens of a forward pass."""

    def mask_for_window(self, window: int | None) -> Tensor | AttentionMaskSpec:
        """Return the mask of a layer whose queries attend to at most `window` keys; a tensor is boolean, [B or 1, 1, S,
        T].
        """


@dataclass(frozen=True)
class SequenceMask:
    """Attention mask of whole sequences: causal or bidirectional, and within documents where attention is closed at
    their ends.

    Under context parallelism these are the sequences of all ranks, of which parts are asked for.

    Attributes:
        length: S.
        begins, blocks: as in `mega_trainer.data.micro_batch.SequenceBounds`. What `mask_for_window` says is without the blocks, which `mask_between` adds.
    """

    length: int
    device: torch.device
    document_starts: np.ndarray | None = None
    causal: bool = True
    bidirectional_blocks: Sequence[ImageBlock] = ()
    _made: dict[tuple[range, int | None], AttentionMaskSpec] = field(default_factory=dict)
    _reach: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def mask_for_window(self, window: int | None) -> AttentionMaskSpec:
        """Return the mask of all tokens; see `AttentionMask`."""
        return self._square(range(self.length), window)

    def mask_between(self, queries: range, keys: range, window: int | None) -> list[MaskPart]:
        """Return the mask of a (query range, key range) pair in parts; the ranges are equal, or one is before the
        other.
        """
        if queries == keys:
            return [
                MaskPart(slice(None), queries, keys, self._square(queries, window)),
                *mask_later_in_block(self.bidirectional_blocks, queries, keys),
            ]
        if self.causal and keys.start > queries.start:
            return mask_later_in_block(self.bidirectional_blocks, queries, keys)
        band = self._band(window)
        if self.document_starts is None:
            found = [rectangle_mask_part(slice(None), queries, keys, band)]
        else:
            early, late = sorted((queries, keys), key=lambda places: places.start)
            # of the documents that begin before the later ones, the last one alone may reach into them
            inside = (self.document_starts[:, late.start : late.stop] < early.stop).sum(1).tolist()
            first = self.document_starts[:, late.start].tolist()
            found = []
            for row, (n, start) in enumerate(zip(inside, first, strict=True)):
                parts = early[max(0, start - early.start) :], late[:n]
                here, there = parts if early is queries else parts[::-1]
                found += [rectangle_mask_part(slice(row, row + 1), here, there, band)] if n else []
        return [part for part in found if part is not None]

    def _band(self, window: int | None) -> BandMask:
        """Return the band that a query attends to."""
        left = None if window is None else window - 1
        return BandMask(left, 0 if self.causal else left)

    def count_preceding_tokens(self, group: CommGroup) -> Tensor | None:
        """Return the number of earlier tokens in its document for each token of a rank of `group`: int64 [B, s].

        None where documents are open: then all before it.
        """
        if self.document_starts is None:
            return None
        share = group.size, group.rank  # layers that exchange heads have whole sequences, others parts
        if share not in self._reach:
            places = rank_token_indices(self.length, group)
            held = places - torch.from_numpy(self.document_starts)[:, places]
            self._reach[share] = to_device(held, self.device)
        return self._reach[share]

    @cached_property
    def cu_seqlens(self) -> tuple[Tensor, Tensor] | None:
        """Starts of all documents, rows concatenated, and the end: int64 [documents + 1], on the device and on the
        host.

        None where they are open.
        """
        if self.document_starts is None:
            return None
        new = np.flatnonzero(self.document_starts == np.arange(self.document_starts.shape[1]))
        host = torch.from_numpy(np.append(new, self.document_starts.size))
        return to_device(host, self.device), host

    def _square(self, indices: range, window: int | None) -> AttentionMaskSpec:
        """Return the mask of a range of tokens to itself, cached."""
        if (indices, window) not in self._made:
            band = self._band(None if window is None or window >= len(indices) else window)
            made: AttentionMaskSpec = band
            if self.document_starts is not None:
                begins = np.maximum(self.document_starts[:, indices.start : indices.stop], indices.start)
                starts = [np.flatnonzero(np.diff(row, prepend=-1)) for row in begins]
                lengths = np.concatenate([np.diff(row, append=len(indices)) for row in starts])
                made = PackedMask.from_lengths(lengths.tolist(), band, self.device)
            self._made[indices, window] = made
        return self._made[indices, window]


@dataclass(frozen=True)
class ForwardContext:
    """State shared by all layers of one forward pass.

    Attributes:
        attention_mask: who sees whom.
        rotation, local_rotation: rotary angles of layers without and with a sliding window, or None.
        cache: keys and values of earlier tokens, or None.
        dropout: the micro-batch's dropout, or None outside training.
        routing: what routers of experts need to know of the training step, or None outside training.
        relative: the table of relative positions that layers share.
        source: of a decoder with an encoder, what the encoder reads and makes.
        routes: experts that are chosen elsewhere, or to be told.
    """

    attention_mask: AttentionMask
    rotation: RotaryAngles | None = None
    local_rotation: RotaryAngles | None = None
    cache: KVCache | None = None
    dropout: SeededDropout | None = None
    routing: StepRouting | None = None
    relative: RelativePositionBias | None = None
    source: EncoderContext | None = None
    routes: RoutingReplay | None = None

    def rotation_for_window(self, window: int | None) -> RotaryAngles | None:
        """Return the rotary angles of a layer whose queries attend to `window` keys, or to all."""
        return self.rotation if window is None else self.local_rotation
