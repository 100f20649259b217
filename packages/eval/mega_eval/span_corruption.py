"""Encoder-decoder models: hidden states of token pairs, and the loss on corrupted spans of a text (T5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mega_data.blended_dataset import BlendedDataset, build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.kinds.t5_samples import T5Sample
from mega_data.tokenizer import Tokenizer
from mega_eval.dataset_scores import DatasetScore, Losses, check_eval_data, sum_window_losses
from mega_trainer.config.sections import TrainConfig
from mega_trainer.data.micro_batch import MicroBatch, SequenceBounds, build_encoder_batch
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.model.decoder import Decoder

SHARE = 0.15
SEED: int = TrainConfig.model_fields["seed"].default


def compute_decoder_states(
    model: Decoder, encoder_tokens: Sequence[Sequence[int]], decoder_tokens: Sequence[Sequence[int]]
) -> Tensor:
    """Return the decoder's final hidden states [B, S, D] for B pairs of encoder tokens and decoder tokens.

    Both are padded on the right to the longest, which no other token sees.
    """
    (source, lengths), (tokens, sizes), device = (
        pad_sequences(encoder_tokens),
        pad_sequences(decoder_tokens),
        model.device,
    )
    given = torch.from_numpy(tokens).to(device)
    batch = MicroBatch(
        tokens=given, labels=given, weights=torch.zeros_like(given, dtype=torch.float32),  # of which nothing is asked here
        positions=torch.arange(given.shape[1], device=device).expand(given.shape), sequence_bounds=SequenceBounds(sizes.tolist()),
        samples=range(len(decoder_tokens)), source=build_encoder_batch(source, lengths, device, CommGroup("cp")),
    )  # fmt: skip
    context = model.make_batch_context(batch, lambda *_: None)
    x: Tensor = model(model.embed_micro_batch(batch, context), context)
    return x


def evaluate_span_corruption(
    model: Decoder, prefix: Path, seq_length: int, tokenizer: Tokenizer, *, share: float = SHARE, seed: int = SEED,
    batch_size: int = 8, same_tokenizer: bool = True, per_sample: Path | None = None,
) -> DatasetScore:  # fmt: skip
    """Score a model on corrupted spans of the data set `prefix`: the samples of one epoch of data kind `t5`, in its
    default order.

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
    check_eval_data(prefix, model, seq_length, tokenizer if same_tokenizer else None)
    raw = {"train": [str(prefix)], "split": [1], "kind": "t5", "seq_length": seq_length}
    config = DataConfig.parse({**raw, "t5": {"mask_probability": share}}, source="hidden spans")
    samples, *_ = build_blended_datasets(config, seed=seed, samples={}, eod=tokenizer.eos_id, tokenizer=tokenizer)
    count = int(samples.samples_per_epoch)
    losses = _sample_losses(model, samples, count, 1 if model.device.type == "cpu" else batch_size)
    return sum_window_losses(losses, count, prefix, model, seq_length, per_sample)


def _sample_losses(model: Decoder, samples: BlendedDataset, count: int, batch_size: int) -> Losses:
    """Yield the summed loss and the token count of each sample."""
    for start in range(0, count, batch_size):
        yield from _batch_losses(model, [samples[k] for k in range(start, min(start + batch_size, count))])


@torch.inference_mode()
def _batch_losses(model: Decoder, samples: Sequence[T5Sample]) -> list[tuple[float, int]]:
    """Return the summed loss and the token count of each sample of one batch."""
    read = [sample.encoder_tokens[sample.encoder_mask].tolist() for sample in samples]
    told = [sample.decoder_tokens[sample.decoder_mask].tolist() for sample in samples]
    x, out = compute_decoder_states(model, read, told), []
    for row, sample in enumerate(samples):  # one by one, as in `perplexity`
        count = len(told[row])
        labels = torch.from_numpy(sample.labels[:count]).to(model.device)[None]
        _, losses = model.compute_token_loss(
            x[row : row + 1, :count], labels, torch.ones_like(labels, dtype=torch.float32)
        )
        out.append((losses.double().sum().item(), count))
    return out


def pad_sequences(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the sequences padded on the right, int64 [n, longest], and their lengths, int64 [n]."""
    lengths = np.array([len(row) for row in rows])
    out = np.zeros((len(rows), lengths.max()), np.int64)
    for own, row in zip(out, rows, strict=True):
        own[: len(row)] = row
    return out, lengths
