"""Compact attention masks; a mask of queries by keys is only materialised for some rows at a time.

Legend: B batch, S queries, T keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mega_trainer.distributed.device import to_device


@dataclass(frozen=True)
class BandMask:
    """Attention mask of a band: `left` keys before a query and `right` after it, with last query and key aligned.

    Query i of S attends to key j of T if d - left <= j <= d + right, where d = i + T - S, as in flash-attn's
    `window_size`. None means unbounded.
    """

    left: int | None = None
    right: int | None = None

    def visible_keys(self, rows: range, queries: int, keys: int) -> range:
        """Return the range of keys that queries `rows` attend to, with the last of `queries` queries at the last of `keys`."""
        ahead = keys - queries
        first = 0 if self.left is None else max(0, rows[0] + ahead - self.left)
        return range(first, keys if self.right is None else min(keys, rows[-1] + ahead + self.right + 1))

    def materialize_mask(self, rows: range, columns: range, ahead: int, device: torch.device) -> Tensor | None:
        """Return the bool mask [rows, columns] of a range of queries and of keys, true where attended; None if all are.
        `ahead` is keys minus queries in total.
        """
        sees_all = (self.left is None or columns[0] >= rows[-1] + ahead - self.left) and (
            self.right is None or columns[-1] <= rows[0] + ahead + self.right
        )
        if sees_all:
            return None
        query = torch.arange(rows.start, rows.stop, device=device)[:, None] + ahead
        distance = query - torch.arange(columns.start, columns.stop, device=device)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            seen &= distance <= self.left
        if self.right is not None:
            seen &= distance >= -self.right
        return seen


ALL, CAUSAL = BandMask(), BandMask(right=0)


@dataclass(frozen=True, eq=False)
class PackedDocumentMask:
    """Attention mask of packed documents: a token attends only to tokens of its own document.

    Attributes:
        lengths: tokens of each document, the rows of a batch concatenated; no document crosses rows.
        band: mask within each document.
        cu_seqlens: int32 [documents + 1], starts of the documents, and the end, on the device of the tokens.
    """

    lengths: tuple[int, ...]
    band: BandMask
    cu_seqlens: Tensor

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], band: BandMask, device: torch.device) -> PackedDocumentMask:
        """Return the attention mask of packed documents of `lengths` tokens, each masked by `band`, with tensors on `device`.
        The host does not wait for the device.
        """
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return cls(tuple(lengths), band, to_device(starts, device))


AttentionMaskSpec = BandMask | PackedDocumentMask


def materialize_dense_mask(mask: AttentionMaskSpec, shape: Sequence[int], keys: int, device: torch.device) -> Tensor:
    """Return a mask as bool [B or 1, 1, S queries, `keys`] for queries of `shape` [B, S, ..], for unfused attention."""
    rows, queries = shape[:2]
    band = mask if isinstance(mask, BandMask) else mask.band
    seen = band.materialize_mask(range(queries), range(keys), keys - queries, device)
    if seen is None:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if isinstance(mask, BandMask):
        return seen[None, None]
    document = to_device(torch.repeat_interleave(torch.tensor(mask.lengths)).view(rows, queries), device)
    return (seen & (document[:, :, None] == document[:, None, :]))[:, None]


@dataclass(frozen=True)
class AttentionMaskBlock:
    """Attention mask for a range of queries and a range of keys in some batch rows.
    The ranges are equal or do not overlap.

    Attributes:
        rows: rows of the batch.
        queries, keys: positions in the sequence.
        mask: mask of these queries and keys.
    """

    rows: slice
    queries: range
    keys: range
    mask: AttentionMaskSpec


def make_rectangle_mask_block(rows: slice, queries: range, keys: range, band: BandMask) -> AttentionMaskBlock | None:
    """Return the attention mask of two ranges that do not overlap, cut to its visible part, or None if it is empty.

    A query at position i attends to i - left to i + right. The ranges are cut to attending queries and attended keys.
    """
    unbounded = len(queries) + len(keys) + abs(queries.start - keys.start)  # more than the distance of any two
    left, right = (unbounded if side is None else side for side in (band.left, band.right))
    queries = range(max(queries.start, keys.start - right), min(queries.stop, keys.stop + left))
    if not queries:
        return None
    keys = range(max(keys.start, queries.start - left), min(keys.stop, queries.stop + right))
    ahead = queries.stop - keys.stop  # a `BandMask` aligns the last query with the last key
    return AttentionMaskBlock(
        rows, queries, keys,
        BandMask(
            left=None if queries[-1] - keys.start <= left else left - ahead,
            right=None if keys[-1] - queries.start <= right else right + ahead,
        ),
    )  # fmt: skip


PagedAttentionName = Literal["flash", "gathered", "rows"]  # implementations, see `kernels.paged_attention`


@dataclass(frozen=True)
class VisiblePagedKeys:
    """Keys in a paged KV cache that one new query per row attends to; each query is at its row's last key.

    Legend: N rows, P pages of a row, T visible keys of the row that has most.

    Attributes:
        block_table: pages of each row, int32 [N, P]; entries after a row's last page are 0.
        first, stop: positions of the first visible key of each row, and one after the last, int64 [N].
        page: tokens per page.
        longest: most visible keys of a row.
        total: number of visible keys of all rows.
        left: most visible keys before the query's position under a sliding window, else None.
        chunked: the visible keys are those of the query's chunk, which does not slide.
    """

    block_table: Tensor
    first: Tensor
    stop: Tensor
    page: int
    longest: int
    total: int
    left: int | None = None
    chunked: bool = False

    @classmethod
    def from_bounds(
        cls,
        block_table: Tensor,
        first: Sequence[int],
        stop: Sequence[int],
        page: int,
        *,
        window: int | None = None,
        chunked: bool = False,
    ) -> VisiblePagedKeys:
        """Return the visible keys of rows, on the block table's device, from positions in host memory.
        `window` is the sliding window in tokens, or None; `chunked`: it is a chunk that does not slide.
        """
        counts = [last - begin for begin, last in zip(first, stop, strict=True)]
        bounds = to_device(torch.tensor([first, stop]), block_table.device)
        left = None if window is None or chunked else window - 1
        return cls(
            block_table, bounds[0], bounds[1], page, max(counts), sum(counts), left,
            chunked and window is not None,
        )  # fmt: skip

    @cached_property
    def mask(self) -> Tensor | None:
        """Mask of the visible keys in the padded batch, bool [N, 1, 1, T]; None if no row is padded."""
        if self.total == self.longest * len(self.stop):
            return None
        return (self.offsets < (self.stop - self.first)[:, None])[:, None, None]

    @cached_property
    def slots(self) -> Tensor:
        """Cache slots of the visible keys, int64 [N * T], each row padded to the longest by its first key.
        Slots that were never written may contain NaN.
        """
        positions = self.first[:, None] + self.offsets
        if self.mask is not None:
            positions = positions.where(self.mask[:, 0, 0], self.first[:, None])
        pages = self.block_table.long().gather(1, positions // self.page)
        return (pages * self.page + positions % self.page).flatten()

    @cached_property
    def lengths(self) -> Tensor:
        """Number of cached keys of each row, including those that a window hides, int32 [N]."""
        return self.stop.int()

    @cached_property
    def query_starts(self) -> Tensor:
        """Index of each row's query, and the number of queries, int32 [N + 1] (cu_seqlens)."""
        return torch.arange(len(self.stop) + 1, dtype=torch.int32, device=self.stop.device)

    @cached_property
    def offsets(self) -> Tensor:
        """Indices 0 to T - 1 of the keys of a row in the padded batch, int64 [T]."""
        return torch.arange(self.longest, device=self.stop.device)
