"""Which keys a query sees, said in a few numbers: no mask of queries by keys is made of it but for some rows at a time.

Legend: B batch, S queries, T keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_trainer.device import to_device


@dataclass(frozen=True)
class Band:
    """A band along the diagonal that ends in the last query and the last key, as flash-attn's `window_size` says it.

    Query i of S sees key j of T when, with d = i + T - S,  d - left <= j <= d + right. None is no bound.
    """

    left: int | None = None
    right: int | None = None

    def keys(self, rows: range, queries: int, keys: int) -> range:
        """The keys of T = `keys` that some of these rows of S = `queries` see."""
        ahead = keys - queries
        first = 0 if self.left is None else max(0, rows[0] + ahead - self.left)
        return range(first, keys if self.right is None else min(keys, rows[-1] + ahead + self.right + 1))

    def mask(self, rows: range, columns: range, ahead: int, device: torch.device) -> Tensor | None:
        """bool [rows, columns], True where seen; None if all is. `ahead` is T - S."""
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


ALL, CAUSAL = Band(), Band(right=0)


@dataclass(frozen=True, eq=False)
class Packed:
    """Documents one after another, none of which sees another.

    Attributes:
        lengths: tokens of each, those of a batch's rows one after another; none crosses from one row to the next.
        band: what a query sees of its own document.
        cu_seqlens: int32 [documents + 1], where each begins, and the end, on the device of the tokens.
    """

    lengths: tuple[int, ...]
    band: Band
    cu_seqlens: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], band: Band, device: torch.device) -> Packed:
        """From the number of tokens of each document. The device is not waited for."""
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return cls(tuple(lengths), band, to_device(starts, device))


Mask = Band | Packed


def dense(mask: Mask, shape: Sequence[int], keys: int, device: torch.device) -> Tensor:
    """The same as a boolean [B or 1, 1, S, T] for queries of `shape` [B, S, ..], for what is made product by product."""
    rows, queries = shape[:2]
    band = mask if isinstance(mask, Band) else mask.band
    seen = band.mask(range(queries), range(keys), keys - queries, device)
    if seen is None:
        seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if isinstance(mask, Band):
        return seen[None, None]
    document = torch.repeat_interleave(torch.tensor(mask.lengths)).view(rows, queries).to(device)
    return (seen & (document[:, :, None] == document[:, None, :]))[:, None]


@dataclass(frozen=True)
class Part:
    """Some queries, and keys before or behind them or the same, in which something is seen.

    Attributes:
        rows: of the batch.
        queries, keys: their places in the sequence.
        mask: of these queries and these keys.
    """

    rows: slice
    queries: range
    keys: range
    mask: Mask


def rectangle(rows: slice, queries: range, keys: range, band: Band) -> Part | None:
    """What queries see of keys that all come before them, or all behind, where a query at place i sees those from i - left to
    i + right: only queries that see any, and keys that are seen; None if there are none.
    """
    apart = len(queries) + len(keys) + abs(queries.start - keys.start)  # more than any two of them are
    left, right = (apart if side is None else side for side in (band.left, band.right))
    queries = range(max(queries.start, keys.start - right), min(queries.stop, keys.stop + left))
    if not queries:
        return None
    keys = range(max(keys.start, queries.start - left), min(keys.stop, queries.stop + right))
    ahead = queries.stop - keys.stop  # a band is counted from where the last query stands at the last key
    return Part(
        rows, queries, keys,
        Band(
            left=None if queries[-1] - keys.start <= left else left - ahead,
            right=None if keys[-1] - queries.start <= right else right + ahead,
        ),
    )  # fmt: skip
