"""Perplexity of two versions of a model on the same tokens, such as before and after quantization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mega_common.bounded_parsing import read_utf8_text
from mega_common.errors import DataError
from mega_common.object_store import Location
from mega_data.blended_dataset import SequentialDataset
from mega_eval.dataset_scores import DatasetScore, compute_dataset_score, compute_window_losses, evaluate_perplexity
from mega_eval.model_loading import load_inference_model, load_tokenizer

WINDOW = 1024  # tokens at most


@dataclass(frozen=True)
class PerplexityComparison:
    """Scores of two models on the same tokens."""

    before: DatasetScore
    after: DatasetScore

    @property
    def change(self) -> float:
        """Perplexity of the second model over the perplexity of the first, minus 1."""
        return self.after.perplexity / self.before.perplexity - 1

    def __str__(self) -> str:
        return (
            f"perplexity {self.before.perplexity:.4f} before, {self.after.perplexity:.4f} after ({100 * self.change:+.2f} %),"
            f" on {self.before.tokens:,} tokens in sequences of up to {self.before.seq_length:,}"
        )


def compare_perplexity(one: str | Location, other: str | Location, data: Path) -> PerplexityComparison:
    """Return the perplexity of two decoders in fp32 on a text file or a token data set.
    The tokenizer of the first model encodes the text. The models run one after the other.

    Args:
        one: folder, file or URL of the first model.
        other: of the second.
        data: a text file, or the prefix of a token data set.

    Raises:
        CheckpointError: when a model cannot be loaded or is not a decoder.
        DataError: when the data cannot be used.
    """
    tokens = encode_text_file(one, data, "perplexity") if data.is_file() else None
    return PerplexityComparison(*(_score(path, data, tokens) for path in (one, other)))


def encode_text_file(model: str | Location, path: Path, purpose: str) -> npt.NDArray[np.int64]:
    """Return the token ids of a text file by a model's tokenizer; a DataError, naming `purpose`, if there are under two.

    Raises:
        CheckpointError: when the model has no tokenizer.
        DataError: when the file cannot be read, or has fewer than two tokens.
    """
    tokens = np.array(load_tokenizer(model).encode(read_utf8_text(path, DataError)), np.int64)
    if len(tokens) < 2:
        raise DataError(f"{path}: {purpose} requires at least two tokens, and the text has {len(tokens)}")
    return tokens


def _score(path: str | Location, data: Path, tokens: npt.NDArray[np.int64] | None) -> DatasetScore:
    model = load_inference_model(path)
    length = min(model.config.max_position, WINDOW)
    if tokens is None:
        return evaluate_perplexity(model, data, length)
    windows = SequentialDataset(tokens, length)
    return compute_dataset_score(compute_window_losses(model, windows, 1), len(windows), data, model, length, None)
