"""Batch and layout: rows of a data rank, and how many ranks hold other data."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mega_cli.moving_in.given import Given


@dataclass(frozen=True)
class RankSplit:
    """Ranks that share one model and its sequences: those which read the same rows.

    Attributes:
        tp, pp: tensor and pipeline parallel sizes.
        cp: ranks that share the tokens of a sequence, by ring attention or by Ulysses.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks that hold one copy of the model."""
        return prod((self.tp, self.pp, self.cp))


def put_split(given: Given, split: RankSplit, origins: dict[str, str]) -> None:
    """Set the sizes of `parallel` that are not 1."""
    for key, origin in origins.items():
        size = getattr(split, key)
        given.put(f"parallel.{key}", size if size > 1 else None, origin)


def count_data_ranks(given: Given, ranks: int | None, split: RankSplit) -> int | None:
    """Return the number of data ranks, or None where the number of ranks is not known.

    Raises:
        ConfigError: when the ranks are no multiple of those that share a model.
    """
    if ranks is None:
        return None
    if ranks % split.ranks:
        shown = f"tp = {split.tp} x pp = {split.pp} x cp = {split.cp}"
        given.refuse_run(
            f"{ranks} ranks must be a multiple of {split.ranks}, the ranks that share a model ({shown})",
            "give another number of ranks with --nproc",
        )
    return ranks // split.ranks


def put_batch(given: Given, micro: int | None, rows: int | None, data_ranks: int | None) -> None:
    """Set `batch` from the rows of a data rank at once and in a whole step.

    Args:
        micro: rows of a rank in one forward pass.
        rows: rows of a data rank in one optimizer step.
        data_ranks: ranks that read other rows; None where it is not known.
    """
    given.put("batch.micro", micro, "rows of a rank at once")
    if rows is None:
        return
    if data_ranks is None:
        text = "is for one data rank: elsewhere it is multiplied by the number of data ranks; --nproc gives the ranks"
        given.tell("open", text, "batch.global")
    given.put("batch.global", rows * (data_ranks or 1), "micro x accumulation x data ranks")
