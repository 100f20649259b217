"""How often a reward model gives the chosen answer of a preference pair the larger score."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mega_common.errors import DataError
from mega_common.log import ProgressBar
from mega_data.files.indexed import IndexedReader
from mega_data.files.info import count_unpaired
from mega_data.files.mask import kind_of
from mega_eval.load import check_length
from mega_eval.perplexity import check_vocabulary
from mega_trainer.model.decoder import Decoder


@dataclass(frozen=True)
class Preferences:
    """What scores say of pairs.

    Attributes:
        accuracy: share of pairs whose chosen answer has the larger score.
        margin: mean difference of the scores.
        pairs: how many.
    """

    accuracy: float
    margin: float
    pairs: int

    def lines(self) -> list[tuple[str, str]]:
        """What is told on the screen: names and values."""
        return [("accuracy", f"{self.accuracy:.4f} of {self.pairs:,} pairs"), ("margin", f"{self.margin:.4f}")]

    def as_json(self) -> dict[str, Any]:
        """For a script."""
        return asdict(self)


@torch.inference_mode()
def score_pairs(model: Decoder, prefix: Path) -> Preferences:
    """Score every answer of the preference pairs `prefix` by a reward model, each alone, at its last token.

    Raises:
        DataError: when these are no pairs, or not of the model's vocabulary.
    """
    reader = IndexedReader(prefix)
    if kind_of(reader) != "pairs":
        raise DataError(f"{prefix}: holds {kind_of(reader)}, and a reward model compares the answers of pairs")
    if unpaired := count_unpaired(prefix):
        raise DataError(
            f"{prefix}: {unpaired} answers are rated alone, and a reward model compares the answers of pairs"
        )
    check_vocabulary(prefix, model.config.vocab_size)
    check_length(model.config, int(reader.lengths.max()), f"answers of up to {reader.lengths.max()} tokens")
    scores = np.empty(len(reader))
    with ProgressBar("scoring", total=len(reader), unit="answers") as bar:
        for number in range(len(reader)):
            tokens = torch.from_numpy(reader.read(number).astype(np.int64)).to(model.device)[None]
            positions = torch.arange(tokens.shape[1], device=model.device)[None]
            x = model(model.embed(tokens, positions), model.context(positions))
            scores[number] = model.logits(x)[0, -1, 0].item()
            bar.advance(1)
    apart = scores[::2] - scores[1::2]
    return Preferences(float((apart > 0).mean()), float(apart.mean()), len(apart))
