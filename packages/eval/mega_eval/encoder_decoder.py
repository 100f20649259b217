"""A model with an encoder, asked: what it makes of two sequences, and how well it tells the spans that are hidden in a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mega_data.config import DataConfig
from mega_data.dataset import BlendedDataset, build_datasets
from mega_data.kinds.t5 import T5Sample
from mega_data.tokenizer import Tokenizer
from mega_eval.perplexity import Losses, Result, added_up, checked_info
from mega_trainer.batch import MicroBatch, Outline, source_batch
from mega_trainer.comm import Group
from mega_trainer.model.decoder import Decoder
from mega_trainer.sections import TrainConfig

SHARE = 0.15
SEED: int = TrainConfig.model_fields["seed"].default


def hidden(model: Decoder, read: Sequence[Sequence[int]], told: Sequence[Sequence[int]]) -> Tensor:
    """The decoder's residual stream [B, S, D] behind all layers, of B pairs: what the encoder reads, what the decoder is given.

    Both are padded on the right to the longest, which no other token sees.
    """
    (source, lengths), (tokens, sizes), device = padded(read), padded(told), model.device
    given = torch.from_numpy(tokens).to(device)
    batch = MicroBatch(
        tokens=given, labels=given, weights=torch.zeros_like(given, dtype=torch.float32),  # of which nothing is asked here
        positions=torch.arange(given.shape[1], device=device).expand(given.shape), outline=Outline(sizes.tolist()),
        samples=range(len(told)), source=source_batch(source, lengths, device, Group("cp")),
    )  # fmt: skip
    context = model.context_of(batch, lambda *_: None)
    x: Tensor = model(model.begin(batch, context), context)
    return x


def evaluate_spans(
    model: Decoder, prefix: Path, seq_length: int, tokenizer: Tokenizer, *, share: float = SHARE, seed: int = SEED,
    batch_size: int = 8, same_tokenizer: bool = True, per_sample: Path | None = None,
) -> Result:  # fmt: skip
    """Score a model on hidden spans of the data set `prefix`: the samples of one epoch of data kind `t5`, in its default order.

    So it is the loss that a run with this seed tells of the same data set, when its validation reads all of them.

    Args:
        model: in eval mode.
        prefix: the data set, without .bin and .idx.
        seq_length: tokens of the encoder.
        tokenizer: the model's, for its sentinels.
        share: of the tokens that are hidden.
        seed: of the draws.
        batch_size: samples computed together on a GPU, as in `perplexity.evaluate`.
        same_tokenizer: whether the data set must have been made with `tokenizer`.
        per_sample: as in `perplexity.evaluate`.

    Raises:
        ConfigError: when nothing, or everything, is to be hidden.
        DataError: when the data set cannot be used, or is not of the model's vocabulary or tokenizer; when the tokenizer
            has no sentinels.
        CheckpointError: when a loss is not a number.
    """
    checked_info(prefix, model, seq_length, tokenizer if same_tokenizer else None)
    raw = {"train": [str(prefix)], "split": [1], "kind": "t5", "seq_length": seq_length}
    config = DataConfig.parse({**raw, "t5": {"mask_probability": share}}, source="hidden spans")
    samples, *_ = build_datasets(config, seed=seed, samples={}, eod=tokenizer.eos_id, tokenizer=tokenizer)
    count = int(samples.samples_per_epoch)
    losses = _losses(model, samples, count, 1 if model.device.type == "cpu" else batch_size)
    return added_up(losses, count, prefix, model, seq_length, per_sample)


def _losses(model: Decoder, samples: BlendedDataset, count: int, batch_size: int) -> Losses:
    for start in range(0, count, batch_size):
        yield from _of_batch(model, [samples[k] for k in range(start, min(start + batch_size, count))])


@torch.inference_mode()
def _of_batch(model: Decoder, samples: Sequence[T5Sample]) -> list[tuple[float, int]]:
    read = [sample.encoder_tokens[sample.encoder_mask].tolist() for sample in samples]
    told = [sample.decoder_tokens[sample.decoder_mask].tolist() for sample in samples]
    x, out = hidden(model, read, told), []
    for row, sample in enumerate(samples):  # one by one, as in `perplexity`
        count = len(told[row])
        labels = torch.from_numpy(sample.labels[:count]).to(model.device)[None]
        _, losses = model.loss(x[row : row + 1, :count], labels, torch.ones_like(labels, dtype=torch.float32))
        out.append((losses.double().sum().item(), count))
    return out


def padded(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """int64 [n, longest], and how many of each are no padding, int64 [n]."""
    lengths = np.array([len(row) for row in rows])
    out = np.zeros((len(rows), lengths.max()), np.int64)
    for own, row in zip(out, rows, strict=True):
        own[: len(row)] = row
    return out, lengths
