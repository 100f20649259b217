"""Types of the counts in a configuration that lists are made of, with limits beyond any model or machine."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

LayerCount = Annotated[int, Field(gt=0, le=10_000)]
ExpertCount = Annotated[int, Field(gt=0, le=100_000)]
RankCount = Annotated[int, Field(gt=0, le=1_000_000)]
SampleCount = Annotated[int, Field(gt=0, le=1_000_000)]
StageCount = Annotated[int, Field(gt=0, le=1_024)]
Size = Annotated[int, Field(gt=0, le=1 << 40)]  # widths, tokens of a vocabulary, steps: arithmetic alone
MOST_BATCH_SIZES = 10_000  # sizes of a batch while it grows
