"""How much of each data set a run reads, told before it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mega_data.config import DataConfig
from mega_data.order.curriculum import fixed_blend, training_blend
from mega_data.order.parts import SPLITS, Part, Parts
from mega_data.retrieval.neighbors import neighbors_of


@dataclass(frozen=True)
class Use:
    """How much of a data set a run reads: `samples` of a split, which are its tokens there `epochs` times."""

    split: str
    prefix: Path
    documents: int
    tokens: int
    samples: float
    epochs: float


def planned_use(config: DataConfig, samples: Mapping[str, int], eod: int | None) -> list[Use]:
    """What a run that reads `samples` of each split reads of each data set; nothing is built for it.

    Raises:
        ConfigError, DataError: as when the data is loaded.
    """
    parts, found = Parts(config, eod), []
    for name in SPLITS:
        chosen = parts.of(name) if name == "train" or samples.get(name) else []
        passes = [_samples_per_epoch(part, config) for part in chosen]
        limits = [part.limit(partial(float, each)) for part, each in zip(chosen, passes, strict=True)]
        blend = training_blend(chosen, config, limits) if name == "train" else fixed_blend(chosen) if chosen else None
        counts = blend.counts(samples.get(name, 0)) if blend else []
        for part, count, each in zip(chosen, counts, passes, strict=True):
            found.append(Use(name, part.reader.prefix, part.reader.documents, part.tokens, count, count / each))
    return found


def _samples_per_epoch(part: Part, config: DataConfig) -> float:
    """About; of kind retro the padding of documents counts."""
    if part.kind != "retro":
        return part.tokens / config.seq_length
    neighbors = neighbors_of(part.source.neighbors if part.source else None, part.reader)
    own = neighbors.chunks.of_sequences(part.first, part.last)
    neighbors.check_split(own)
    return len(own) * neighbors.info.chunk_length / config.seq_length
