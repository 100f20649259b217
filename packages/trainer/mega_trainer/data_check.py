"""A look at a run's data before it starts: is it there, is it the model's, how often is it read. No torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mega_common.errors import DataError
from mega_data.files.indexed import IndexedReader
from mega_data.files.info import count_unpaired
from mega_data.order.use import Use, planned_use
from mega_trainer.config import RunConfig
from mega_trainer.tokens import run_tokenizer

BLOCKS, BLOCK = 64, 4096  # tokens that are looked at: some of everywhere


def check_data(config: RunConfig) -> list[Use]:
    """What the run reads of each of its data sets.

    Raises:
        ConfigError, DataError: when a data set is missing or damaged, is of other tokenizers or of a larger vocabulary
            than the model's, or lacks the end tokens that the configuration's rules ask for.
    """
    tokenizer = run_tokenizer(config.data, config.model.vocab_size)
    uses = planned_use(config.data, config.samples, None if tokenizer is None else tokenizer.eos_id)
    for prefix in {use.prefix: None for use in uses}:
        _check_pairs(config, prefix)
        largest = largest_seen(IndexedReader(prefix))
        if largest >= config.model.vocab_size:
            raise DataError(
                f"{prefix}: has the token {largest}, and model.vocab_size is {config.model.vocab_size}",
                hint="the data set was made with the tokenizer of another model",
            )
    return uses


def _check_pairs(config: RunConfig, prefix: Path) -> None:
    """Refuse rated answers without a pair for an objective that compares the two answers of a pair.

    Raises:
        DataError: naming the data set.
    """
    unpaired, kind = count_unpaired(prefix), config.objective.kind
    if unpaired and config.objective.of_pairs and kind != "kto":
        raise DataError(
            f"{prefix}: {unpaired} answers are rated alone, and objective.kind = {kind} requires pairs of answers",
            hint="objective.kind: kto, or records with chosen and rejected",
        )


def largest_seen(reader: IndexedReader) -> int:
    """The largest token of some blocks that are spread over a data set."""
    starts = np.linspace(0, max(reader.num_tokens - BLOCK, 0), BLOCKS).astype(np.int64)
    return max((int(reader.tokens[start : start + BLOCK].max(initial=0)) for start in starts), default=0)


def told(use: Use) -> str:
    """A line about a data set."""
    return (
        f"{use.split} {use.prefix}: {use.documents:,} documents, {use.tokens:,} tokens; "
        f"{round(use.samples):,} samples, {use.epochs:.2f} epochs"
    )
