"""How well a model predicts held-out tokens: loss, perplexity and bits per byte, token by token.

The data set is read from its first token to its last in windows of S tokens; every token but the first is predicted
exactly once, from what stands before it in its window. All averages are over tokens, summed in fp64 in the data's order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mega_common.errors import CheckpointError, DataError
from mega_common.files import atomic_file
from mega_common.log import ProgressBar
from mega_data.dataset import SequentialDataset, sequential
from mega_data.files.indexed import IndexedReader
from mega_data.files.info import DataInfo, TokenizerInfo, read_info
from mega_data.kinds.base import Sample
from mega_data.tokenizer import Tokenizer
from mega_eval.load import check_length
from mega_trainer.model.decoder import Decoder

CHUNK = 1 << 24  # tokens looked at together

Losses = Iterator[tuple[float, int]]  # of each window the sum, in nats, and how many tokens it predicts


@dataclass(frozen=True)
class Result:
    """The score of a data set.

    Attributes:
        loss: mean cross entropy, in nats per token.
        bits_per_byte: bits for all predicted tokens / bytes of the text; None where the bytes are not known.
        tokens: tokens predicted.
        windows: sequences they were predicted in.
        seq_length: S.
    """

    loss: float
    bits_per_byte: float | None
    tokens: int
    windows: int
    seq_length: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def lines(self) -> list[tuple[str, str]]:
        """What is told on the screen: names and values."""
        lines = [("loss", f"{self.loss:.4f} nats per token"), ("perplexity", f"{self.perplexity:.3f}")]
        if self.bits_per_byte is not None:
            lines.append(("bits per byte", f"{self.bits_per_byte:.4f}"))
        return [*lines, ("tokens", f"{self.tokens:,} in {self.windows:,} sequences of up to {self.seq_length:,}")]

    def as_json(self) -> dict[str, Any]:
        """For a script; infinite perplexity, which JSON cannot say, is null."""
        perplexity = self.perplexity
        return {
            "loss": self.loss, "perplexity": None if math.isinf(perplexity) else perplexity,
            "bits_per_byte": self.bits_per_byte, "tokens": self.tokens, "windows": self.windows,
            "seq_length": self.seq_length,
        }  # fmt: skip


def evaluate(
    model: Decoder, prefix: Path, seq_length: int, *, batch_size: int = 8, tokenizer: Tokenizer | None = None,
    per_sample: Path | None = None,
) -> Result:  # fmt: skip
    """Score `model` on the data set `prefix`.

    Args:
        model: in eval mode.
        prefix: the data set, without .bin and .idx.
        seq_length: S, tokens that the model sees at once.
        batch_size: windows computed together on a GPU. A CPU gains nothing by it and takes them one by one, so that
            no bit of a loss depends on what else is computed.
        tokenizer: the model's, to be compared with the one that made the data set.
        per_sample: where to write a JSON line {"sample", "tokens", "loss"} for each window.

    Raises:
        DataError: when the data set cannot be used or is not of the model's vocabulary or tokenizer.
        CheckpointError: when a loss is not a number.
    """
    info = checked_info(prefix, model, seq_length, tokenizer)
    windows = sequential(prefix, seq_length)
    together = 1 if model.device.type == "cpu" else batch_size
    losses = window_losses(model, windows, together)
    return added_up(
        losses, len(windows), prefix, model, seq_length, per_sample, text_bytes=info.text_bytes if info else 0
    )


def added_up(
    losses: Losses, windows: int, prefix: Path, model: Decoder, seq_length: int, per_sample: Path | None, *,
    text_bytes: int = 0,
) -> Result:  # fmt: skip
    """The score of a data set, by the losses of its windows; `per_sample` as in `evaluate`.

    Raises:
        DataError: when none of its tokens is predicted.
        CheckpointError: when a loss is not a number.
    """
    found, tokens = [], 0
    with ExitStack() as stack:
        bar = stack.enter_context(ProgressBar("evaluating", total=windows, unit="sequences"))
        out = stack.enter_context(atomic_file(per_sample, text=True)) if per_sample else None
        for number, (loss, count) in enumerate(losses):
            if not math.isfinite(loss):
                raise CheckpointError(
                    f"{prefix}: the loss of window {number} is {loss} in {model.dtype}", hint="try --precision fp32"
                )
            if out is not None:
                out.write(json.dumps({"sample": number, "tokens": count, "loss": loss / max(count, 1)}) + "\n")
            found.append(loss)
            tokens += count
            bar.advance(1)
    if not tokens:
        raise DataError(f"{prefix}: all of its tokens are special ones, which no encoder guesses")
    total = math.fsum(found)
    bits = total / math.log(2) / text_bytes if text_bytes else None
    return Result(total / tokens, bits, tokens, windows, seq_length)


def window_losses(model: Decoder, windows: SequentialDataset, batch_size: int) -> Losses:
    """Each window's sum of losses in nats, and how many tokens it predicts."""
    for start in range(0, len(windows), batch_size):
        samples = [windows[number] for number in range(start, min(start + batch_size, len(windows)))]
        yield from zip(_batch_losses(model, samples), (int(s.loss_weights.sum()) for s in samples), strict=True)


@torch.inference_mode()
def _batch_losses(model: Decoder, samples: Sequence[Sample]) -> list[float]:
    device = model.device
    tokens, labels, weights = (
        torch.from_numpy(np.stack(arrays)).to(device)
        for arrays in zip(*((s.tokens, s.labels, s.loss_weights) for s in samples), strict=True)
    )
    positions = torch.arange(tokens.shape[1], device=device)[None]
    x = model(model.embed(tokens, positions), model.context(positions))
    out = []
    for row in range(len(samples)):  # one by one: the head works in chunks of tokens, which are to be the same
        part = slice(row, row + 1)
        _, losses = model.loss(x[part], labels[part], weights[part])
        out.append(losses[weights[part] > 0].double().sum().item())
    return out


def check_vocabulary(prefix: Path, vocab_size: int) -> None:
    """Read all tokens once.

    Raises:
        DataError: naming the first that a model of `vocab_size` entries does not know.
    """
    tokens = IndexedReader(prefix).tokens
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        wrong = np.flatnonzero((part < 0) | (part >= vocab_size))
        if wrong.size:
            at = start + int(wrong[0])
            raise DataError(
                f"{prefix}: token {tokens[at]} (number {at}) is outside the model's vocabulary of {vocab_size}",
                hint="the data set was made with the tokenizer of another model",
            )


def checked_info(prefix: Path, model: Decoder, seq_length: int, tokenizer: Tokenizer | None) -> DataInfo | None:
    """What is told of a data set that a model is to be scored on; `tokenizer` is the model's, where it is to be compared.

    Raises:
        DataError: when it is not of the model's vocabulary or tokenizer, or the model has fewer positions.
    """
    info = read_info(prefix)
    if tokenizer is not None and info is not None and info.tokenizer is not None:
        check_tokenizer(prefix, info.tokenizer, tokenizer)
    check_vocabulary(prefix, model.config.vocab_size)
    check_length(model.config, seq_length, f"windows of {seq_length} tokens")
    return info


def check_tokenizer(prefix: Path, made_by: TokenizerInfo, tokenizer: Tokenizer) -> None:
    """Compare the tokenizer that made a data set with the model's.

    Raises:
        DataError: when they differ.
    """
    if made_by.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{prefix}: made with another tokenizer ({made_by.path}, {made_by.fingerprint[:12]}) than the model's"
            f" ({tokenizer.path}, {tokenizer.fingerprint[:12]})",
            hint="tokenize the text with the model's tokenizer; or, where the two differ in form only, skip this check",
        )
