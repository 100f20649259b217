"""Scores of a model on a held-out data set: loss, perplexity and bits per byte.

The data set is read from start to end in windows of S tokens; every token but the first is predicted exactly once, from the
tokens before it in its window. All averages are over tokens, summed in fp64 in the data's order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mega_common.atomic_files import open_atomic_file
from mega_common.errors import CheckpointError, DataError
from mega_common.progress_logging import ProgressBar
from mega_data.blended_dataset import SequentialDataset, open_sequential_dataset
from mega_data.kinds.dataset_kind import TrainingSample
from mega_data.token_files.dataset_info import DatasetInfo, TokenizerInfo, count_unpaired_answers, read_dataset_info
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.loss_mask import read_dataset_kind
from mega_data.tokenizer import Tokenizer
from mega_eval.model_loading import check_sequence_length
from mega_trainer.model.decoder import Decoder

CHUNK = 1 << 24  # tokens checked together

Losses = Iterator[tuple[float, int]]  # for each window the summed loss in nats and the number of predicted tokens


@dataclass(frozen=True)
class DatasetScore:
    """Mean loss, bits per byte and perplexity of a model on a token data set.

    Attributes:
        loss: mean cross entropy, in nats per token.
        bits_per_byte: bits for all predicted tokens / bytes of the text; None if the number of bytes is unknown.
        tokens: number of predicted tokens.
        windows: number of windows.
        seq_length: S.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int
    windows: int
    seq_length: int

    @property
    def perplexity(self) -> float:
        """Perplexity of the data set: exp(`loss`), infinite if that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def summary_lines(self) -> list[tuple[str, str]]:
        """Return the data set's score as (name, value) pairs of text for display."""
        lines = [("loss", f"{self.loss:.4f} nats per token"), ("perplexity", f"{self.perplexity:.3f}")]
        if self.bits_per_byte is not None:
            lines.append(("bits per byte", f"{self.bits_per_byte:.4f}"))
        return [*lines, ("tokens", f"{self.tokens:,} in {self.windows:,} sequences of up to {self.seq_length:,}")]

    def as_json(self) -> dict[str, Any]:
        """Return the data set's score as JSON fields; an infinite perplexity, which JSON cannot represent, is null."""
        perplexity = self.perplexity
        return {
            "loss": self.loss, "perplexity": None if math.isinf(perplexity) else perplexity,
            "bits_per_byte": self.bits_per_byte, "tokens": self.tokens, "windows": self.windows,
            "seq_length": self.seq_length,
        }  # fmt: skip


def evaluate_perplexity(
    model: Decoder, prefix: Path, seq_length: int, *, batch_size: int = 8, tokenizer: Tokenizer | None = None,
    per_sample: Path | None = None,
) -> DatasetScore:  # fmt: skip
    """Return the loss and perplexity of a decoder on a token data set.
    The data set `prefix` is read in windows of `seq_length` tokens.

    Args:
        model: decoder in eval mode.
        prefix: path of the data set without .bin and .idx.
        seq_length: S, tokens of a window.
        batch_size: windows computed together on a GPU. A CPU computes them one by one, which is as fast and makes each
            loss independent of the other windows, bit for bit.
        tokenizer: tokenizer of the model, to check against that of the data set.
        per_sample: file for a JSON line {"sample", "tokens", "loss"} of each window.

    Raises:
        DataError: when the data set cannot be used, or its vocabulary or tokenizer differs from the model's.
        CheckpointError: when a loss is not a number.
    """
    info = check_eval_data(prefix, model, seq_length, tokenizer)
    windows = open_sequential_dataset(prefix, seq_length)
    together = 1 if model.device.type == "cpu" else batch_size
    losses = compute_window_losses(model, windows, together)
    return compute_dataset_score(
        losses, len(windows), prefix, model, seq_length, per_sample, text_bytes=info.text_bytes if info else 0
    )


def compute_dataset_score(
    losses: Losses, windows: int, prefix: Path, model: Decoder, seq_length: int, per_sample: Path | None, *,
    text_bytes: int = 0,
) -> DatasetScore:  # fmt: skip
    """Return the score of a data set from the loss and token count of each of its windows.
    There are `windows` windows; each is also written as a JSON line to the file `per_sample`, if given.

    Raises:
        DataError: when none of its tokens is predicted.
        CheckpointError: when a loss is not a number.
    """
    found, tokens = [], 0
    with ExitStack() as stack:
        bar = stack.enter_context(ProgressBar("evaluating", total=windows, unit="sequences"))
        out = stack.enter_context(open_atomic_file(per_sample, text=True)) if per_sample else None
        for number, (loss, count) in enumerate(losses):
            if not math.isfinite(loss):
                raise CheckpointError(
                    f"{prefix}: the loss of window {number} is {loss} in {model.dtype}", hint="use --precision fp32"
                )
            if out is not None:
                out.write(json.dumps({"sample": number, "tokens": count, "loss": loss / max(count, 1)}) + "\n")
            found.append(loss)
            tokens += count
            bar.advance(1)
    if not tokens:
        raise DataError(f"{prefix}: the data set has only special tokens, which have no loss")
    total = math.fsum(found)
    bits = total / math.log(2) / text_bytes if text_bytes else None
    return DatasetScore(total / tokens, bits, tokens, windows, seq_length)


def compute_window_losses(model: Decoder, windows: SequentialDataset, batch_size: int) -> Losses:
    """Yield the summed loss in nats and the number of predicted tokens of each window of a token data set."""
    for start in range(0, len(windows), batch_size):
        samples = [windows[number] for number in range(start, min(start + batch_size, len(windows)))]
        yield from zip(_batch_losses(model, samples), (int(s.loss_weights.sum()) for s in samples), strict=True)


@torch.inference_mode()
def _batch_losses(model: Decoder, samples: Sequence[TrainingSample]) -> list[float]:
    """Return the summed loss of each sample of a batch."""
    device = model.device
    tokens, labels, weights = (
        torch.from_numpy(np.stack(arrays)).to(device)
        for arrays in zip(*((s.tokens, s.labels, s.loss_weights) for s in samples), strict=True)
    )
    positions = torch.arange(tokens.shape[1], device=device)[None]
    x = model(model.embed_inputs(tokens, positions), model.make_forward_context(positions, tokens=tokens))
    out = []
    for row in range(len(samples)):  # one by one, so that the head's chunks of tokens do not depend on the batch
        part = slice(row, row + 1)
        _, losses = model.compute_token_loss(x[part], labels[part], weights[part])
        out.append(losses[weights[part] > 0].double().sum().item())
    return out


def check_token_ids_in_vocabulary(prefix: Path, vocab_size: int) -> None:
    """Raise DataError at the first token of a data set that is outside the model's vocabulary.
    Tokens of the data set `prefix` must be below `vocab_size`; the whole data set is read once.

    Raises:
        DataError: naming the first token outside a vocabulary of `vocab_size`.
    """
    tokens = IndexedReader(prefix).tokens
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        wrong = np.flatnonzero((part < 0) | (part >= vocab_size))
        if wrong.size:
            at = start + int(wrong[0])
            raise DataError(
                f"{prefix}: token {tokens[at]} at index {at} is outside the model's vocabulary of {vocab_size}",
                hint="preprocess the text with the model's tokenizer",
            )


def check_eval_data(prefix: Path, model: Decoder, seq_length: int, tokenizer: Tokenizer | None) -> DatasetInfo | None:
    """Check that a data set fits a model's vocabulary, tokenizer and positions, and return its info; None without info.
    `tokenizer` is the model's, or None to skip that comparison.

    Raises:
        DataError: when its records are not texts, its vocabulary or tokenizer differs from the model's, or the model has
            fewer positions.
    """
    if (kind := read_dataset_kind(IndexedReader(prefix))) != "text":
        hint = "give a data set of texts; or score this one in training: set data.valid and train.eval_every"
        raise DataError(f"{prefix}: must be a data set of texts, found {kind}", hint=hint)
    info = read_dataset_info(prefix)
    if tokenizer is not None and info is not None and info.tokenizer is not None:
        check_same_tokenizer(prefix, info.tokenizer, tokenizer)
    check_token_ids_in_vocabulary(prefix, model.config.vocab_size)
    check_sequence_length(model.config, seq_length, f"windows of {seq_length} tokens")
    return info


def check_same_tokenizer(prefix: Path, made_by: TokenizerInfo, tokenizer: Tokenizer) -> None:
    """Raise DataError unless a data set was encoded with the model's tokenizer.
    `made_by`, the tokenizer that encoded the data set `prefix`, must have the same fingerprint as `tokenizer`, the
    model's.

    Raises:
        DataError: when they differ.
    """
    if made_by.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{prefix}: the tokenizer of the data set ({made_by.path}, {made_by.fingerprint[:12]}) differs from the model's"
            f" ({tokenizer.path}, {tokenizer.fingerprint[:12]})",
            hint="preprocess the text with the model's tokenizer; or skip this check if both give the same tokens",
        )


@dataclass(frozen=True)
class PreferenceAccuracy:
    """Share of preference pairs in which a reward model scores the chosen answer higher, and the mean margin.

    Attributes:
        accuracy: share of pairs whose chosen answer has the larger score.
        margin: mean score of the chosen answer minus score of the rejected one.
        pairs: number of pairs.
    """

    accuracy: float
    margin: float
    pairs: int

    def summary_lines(self) -> list[tuple[str, str]]:
        """Return the preference accuracy as (name, value) pairs of text for display."""
        return [("accuracy", f"{self.accuracy:.4f} of {self.pairs:,} pairs"), ("margin", f"{self.margin:.4f}")]

    def as_json(self) -> dict[str, Any]:
        """Return the preference accuracy, margin and number of pairs as JSON fields."""
        return asdict(self)


@torch.inference_mode()
def evaluate_preferences(model: Decoder, prefix: Path) -> PreferenceAccuracy:
    """Return the accuracy of a reward model on the preference pairs of a data set.
    It is how often the model scores the chosen answer above the rejected one, over the data set `prefix`; each answer
    is scored separately, at its last token.

    Raises:
        DataError: when the data set does not hold pairs, or has tokens outside the model's vocabulary.
    """
    reader = IndexedReader(prefix)
    if read_dataset_kind(reader) != "pairs":
        raise DataError(f"{prefix}: a reward model requires preference pairs, but this is {read_dataset_kind(reader)}")
    if unpaired := count_unpaired_answers(prefix):
        raise DataError(
            f"{prefix}: a reward model requires preference pairs, but {unpaired} answers here have no counterpart"
        )
    check_token_ids_in_vocabulary(prefix, model.config.vocab_size)
    check_sequence_length(model.config, int(reader.lengths.max()), f"answers of up to {reader.lengths.max()} tokens")
    scores = np.empty(len(reader))
    with ProgressBar("scoring", total=len(reader), unit="answers") as bar:
        for number in range(len(reader)):
            tokens = torch.from_numpy(reader.read_sequence(number).astype(np.int64)).to(model.device)[None]
            positions = torch.arange(tokens.shape[1], device=model.device)[None]
            x = model(model.embed_inputs(tokens, positions), model.make_forward_context(positions, tokens=tokens))
            scores[number] = model.compute_logits(x)[0, -1, 0].item()
            bar.advance(1)
    apart = scores[::2] - scores[1::2]
    return PreferenceAccuracy(float((apart > 0).mean()), float(apart.mean()), len(apart))
