"""What is added to a score by how far its key stands behind its query: one number a head and distance, never one a pair.

Legend: H heads, S queries, T keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DistanceBias:
    """Addends by the distance of key and query.

    Attributes:
        values: [H, n]; a key r places behind its query (negative: before it) adds `values[:, zero + r]`.
        zero: of a key at its query's own place. Query i of S stands at place i + T - S, as `masks.Band` has it.
    """

    values: Tensor
    zero: int

    def places(self, queries: range, keys: range, ahead: int) -> Tensor:
        """Which of the values some queries and keys meet by: int64 [queries, keys]. `ahead` is T - S."""
        at = torch.arange(queries.start, queries.stop, device=self.values.device) + (ahead - self.zero)
        return torch.arange(keys.start, keys.stop, device=self.values.device) - at[:, None]

    def dense(self, queries: int, keys: int) -> Tensor:
        """All addends, [H, S, T]."""
        return self.values[:, self.places(range(queries), range(keys), keys - queries)]

    def heads(self, own: slice) -> DistanceBias:
        """That of some of the heads."""
        return DistanceBias(self.values[own], self.zero)
