"""How much of each data set a run reads, told before it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mega_data.config import DataConfig
from mega_data.order.curriculum import fixed_blend, training_blend
from mega_data.order.parts import SPLITS, Parts


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
        passes = [part.tokens / config.seq_length for part in chosen]
        limits = [part.limit(partial(float, each)) for part, each in zip(chosen, passes, strict=True)]
        blend = training_blend(chosen, config, limits) if name == "train" else fixed_blend(chosen) if chosen else None
        counts = blend.counts(samples.get(name, 0)) if blend else []
        for part, count, each in zip(chosen, counts, passes, strict=True):
            found.append(Use(name, part.reader.prefix, part.reader.documents, part.tokens, count, count / each))
    return found
