"""Rank of this process in its job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """Global rank, local rank and world size of this process in the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
