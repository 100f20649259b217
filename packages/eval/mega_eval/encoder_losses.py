"""Losses of encoders and encoder-decoders on held-out text: masked tokens and corrupted spans.

Masked-LM loss of an encoder: every token is masked exactly once, a share of each window at a time. With a share of 15 % each
window is read seven times with different tokens masked, which gives the masked-language-modelling loss over all tokens. With
one masked token at a time, exp of the mean is the pseudo-perplexity of Salazar et al. (2020, arXiv:1910.14659).

Encoder-decoder models: hidden states of token pairs, and the loss on corrupted spans of a text (T5).

Legend: S tokens of a window, special tokens included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mega_common.errors import DataError
from mega_data.blended_dataset import BlendedDataset, build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.kinds.masked_lm_samples import find_mask_token, mark_unmaskable_tokens
from mega_data.kinds.t5_samples import T5Sample
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.tokenizer import Tokenizer
from mega_eval.dataset_scores import DatasetScore, Losses, check_eval_data, compute_dataset_score
from mega_trainer.config.sections import TrainConfig
from mega_trainer.data.micro_batch import DocumentBounds, MicroBatch, build_encoder_batch
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.model.decoder import Decoder

Ints = npt.NDArray[np.int64]
SHARE = 0.15


def evaluate_masked_lm(
    model: Decoder, prefix: Path, seq_length: int, tokenizer: Tokenizer, *, share: float = SHARE, batch_size: int = 8,
    same_tokenizer: bool = True, per_sample: Path | None = None,
) -> DatasetScore:  # fmt: skip
    """Return the masked-LM loss of an encoder on a token data set.
    The data set `prefix` is read from its first token to its last; every token except special ones is masked and
    predicted once.

    Args:
        model: encoder in eval mode.
        prefix: path of the data set without .bin and .idx.
        seq_length: S, including the tokens that the tokenizer adds at the start and end of a text.
        tokenizer: tokenizer of the model, with a mask token.
        share: share of a window's tokens that are masked together; 0: one at a time.
        batch_size: rows computed together.
        same_tokenizer: require that the data set was made with `tokenizer`.
        per_sample: as in `dataset_scores.evaluate_perplexity`.

    Raises:
        DataError: when the data set cannot be used, its vocabulary or tokenizer differs from the model's, or it has only
            special tokens, or the tokenizer has no mask token.
        CheckpointError: when a loss is not a number.
    """
    check_eval_data(prefix, model, seq_length, tokenizer if same_tokenizer else None)
    windows = MaskedLmWindows(prefix, seq_length, tokenizer)
    losses = (_window_loss(model, window, windows, number, share, batch_size) for number, window in enumerate(windows))
    return compute_dataset_score(losses, len(windows), prefix, model, seq_length, per_sample)


class MaskedLmWindows:
    """Windows of `seq_length` tokens of a data set for masked-LM evaluation.
    Each window is between the begin and end tokens that the tokenizer adds.

    Attributes:
        mask: id of the mask token.
        never_masked: bool [V], tokens that are never masked.
    """

    def __init__(self, prefix: Path, seq_length: int, tokenizer: Tokenizer) -> None:
        special = tokenizer.encode("", add_special_tokens=True)
        self._begin_end = np.array(special[:1], np.int64), np.array(special[1:], np.int64)
        self._size = seq_length - len(special)
        if self._size < 1:
            raise DataError(
                f"windows must be longer than the {len(special)} special tokens of {tokenizer.path}, "
                f"but have {seq_length} tokens"
            )
        self._tokens = IndexedReader(prefix).tokens
        size = max(tokenizer.vocab_size, int(self._tokens.max(initial=0)) + 1)
        self.mask, self.never_masked = (
            find_mask_token(tokenizer),
            mark_unmaskable_tokens(tokenizer, tokenizer.eos_id, size),
        )

    def __len__(self) -> int:
        return -(-self._tokens.size // self._size)

    def __iter__(self) -> Iterator[Ints]:
        for start in range(0, self._tokens.size, self._size):
            begin, end = self._begin_end
            yield np.concatenate([begin, self._tokens[start : start + self._size], end]).astype(np.int64)


@torch.inference_mode()
def _window_loss(
    model: Decoder, window: Ints, windows: MaskedLmWindows, number: int, share: float, batch_size: int
) -> tuple[float, int]:
    """Return the summed loss of a window's tokens in nats, and the number of these tokens."""
    maskable = np.random.default_rng(number).permutation(np.flatnonzero(~windows.never_masked[window]))
    rounds = math.ceil(1 / share) if share else maskable.size
    parts = [part for part in np.array_split(maskable, max(rounds, 1)) if part.size]
    rows, masks = np.repeat(window[None], len(parts), 0), np.zeros((len(parts), window.size), np.bool_)
    for row, part in enumerate(parts):
        rows[row, part], masks[row, part] = windows.mask, True
    positions, total = torch.arange(window.size, device=model.device)[None], 0.0
    for start in range(0, len(rows), batch_size):
        tokens, weights = (
            torch.from_numpy(each[start : start + batch_size]).to(model.device) for each in (rows, masks)
        )
        labels = torch.from_numpy(window).to(model.device).expand(tokens.shape)
        x = model(model.embed_inputs(tokens, positions), model.make_forward_context(positions, tokens=tokens))
        _, losses = model.compute_token_loss(x, labels, weights.float())
        total += losses[weights].double().sum().item()
    return total, maskable.size


SEED: int = TrainConfig.model_fields["seed"].default


def compute_decoder_states(
    model: Decoder, encoder_tokens: Sequence[Sequence[int]], decoder_tokens: Sequence[Sequence[int]]
) -> Tensor:
    """Return the final hidden states [B, S, D] of the decoder of an encoder-decoder model.
    They are for B pairs of encoder tokens and decoder tokens.

    Both are padded on the right to the longest; padding is masked from all other tokens.
    """
    (source, lengths), (tokens, sizes), device = (
        pad_sequences(encoder_tokens),
        pad_sequences(decoder_tokens),
        model.device,
    )
    ids = torch.from_numpy(tokens).to(device)
    batch = MicroBatch(
        tokens=ids, labels=ids, weights=torch.zeros_like(ids, dtype=torch.float32),  # the loss is not computed here
        positions=torch.arange(ids.shape[1], device=device).expand(ids.shape), sequence_bounds=DocumentBounds(sizes.tolist()),
        samples=range(len(decoder_tokens)), source=build_encoder_batch(source, lengths, device, CommGroup("cp")),
    )  # fmt: skip
    context = model.make_batch_context(batch, lambda *_: None)
    x: Tensor = model(model.embed_micro_batch(batch, context), context)
    return x


def evaluate_span_corruption(
    model: Decoder, prefix: Path, seq_length: int, tokenizer: Tokenizer, *, share: float = SHARE, seed: int = SEED,
    batch_size: int = 8, same_tokenizer: bool = True, per_sample: Path | None = None,
) -> DatasetScore:  # fmt: skip
    """Return the loss of a T5-style encoder-decoder on corrupted spans of a token data set.
    The samples are one epoch of data kind `t5` of the data set `prefix`, in the default order.

    The result equals the validation loss of a run with this seed whose validation reads the whole data set.

    Args:
        model: encoder-decoder in eval mode.
        prefix: path of the data set without .bin and .idx.
        seq_length: tokens of the encoder.
        tokenizer: tokenizer of the model, with sentinel tokens.
        share: share of the tokens to mask.
        seed: random seed of the spans.
        batch_size: samples computed together on a GPU, as in `dataset_scores.evaluate_perplexity`.
        same_tokenizer: require that the data set was made with `tokenizer`.
        per_sample: as in `dataset_scores.evaluate_perplexity`.

    Raises:
        ConfigError: when `share` masks no tokens, or all of them.
        DataError: when the data set cannot be used or its vocabulary or tokenizer differs from the model's, or the
            tokenizer has no sentinel tokens.
        CheckpointError: when a loss is not a number.
    """
    check_eval_data(prefix, model, seq_length, tokenizer if same_tokenizer else None)
    raw = {"train": [str(prefix)], "split": [1], "kind": "t5", "seq_length": seq_length}
    config = DataConfig.parse({**raw, "t5": {"mask_probability": share}}, source="hidden spans")
    samples, *_ = build_blended_datasets(config, seed=seed, samples={}, eod=tokenizer.eos_id, tokenizer=tokenizer)
    count = int(samples.samples_per_epoch)
    losses = _sample_losses(model, samples, count, 1 if model.device.type == "cpu" else batch_size)
    return compute_dataset_score(losses, count, prefix, model, seq_length, per_sample)


def _sample_losses(model: Decoder, samples: BlendedDataset, count: int, batch_size: int) -> Losses:
    """Yield the summed loss and the token count of each sample."""
    for start in range(0, count, batch_size):
        yield from _batch_losses(model, [samples[k] for k in range(start, min(start + batch_size, count))])


@torch.inference_mode()
def _batch_losses(model: Decoder, samples: Sequence[T5Sample]) -> list[tuple[float, int]]:
    """Return the summed loss and the token count of each sample of one batch."""
    encoder_tokens = [sample.encoder_tokens[sample.encoder_mask].tolist() for sample in samples]
    decoder_tokens = [sample.decoder_tokens[sample.decoder_mask].tolist() for sample in samples]
    x, out = compute_decoder_states(model, encoder_tokens, decoder_tokens), []
    for row, sample in enumerate(samples):  # one by one, as in `dataset_scores`
        count = len(decoder_tokens[row])
        labels = torch.from_numpy(sample.labels[:count]).to(model.device)[None]
        _, losses = model.compute_token_loss(
            x[row : row + 1, :count], labels, torch.ones_like(labels, dtype=torch.float32)
        )
        out.append((losses.double().sum().item(), count))
    return out


def pad_sequences(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return token sequences padded with 0 on the right, int64 [n, longest], and their lengths, int64 [n]."""
    lengths = np.array([len(row) for row in rows])
    out = np.zeros((len(rows), lengths.max()), np.int64)
    for own, row in zip(out, rows, strict=True):
        own[: len(row)] = row
    return out, lengths
