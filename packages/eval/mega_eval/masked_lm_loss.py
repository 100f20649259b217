"""Masked-LM loss of an encoder on held-out text: every token is masked exactly once, a share of each window at a time.

With a share of 15 % each window is read seven times with different tokens masked, which gives the masked-language-modelling
loss over all tokens. With one masked token at a time, exp of the mean is the pseudo-perplexity of Salazar et al. (2020,
arXiv:1910.14659).

Legend: S tokens of a window, special tokens included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mega_common.errors import DataError
from mega_data.kinds.masked_lm_samples import find_mask_token, find_unmaskable_tokens
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.tokenizer import Tokenizer
from mega_eval.dataset_scores import DatasetScore, check_eval_data, sum_window_losses
from mega_trainer.model.decoder import Decoder

Ints = npt.NDArray[np.int64]
SHARE = 0.15


def evaluate_masked_lm(
    model: Decoder, prefix: Path, seq_length: int, tokenizer: Tokenizer, *, share: float = SHARE, batch_size: int = 8,
    same_tokenizer: bool = True, per_sample: Path | None = None,
) -> DatasetScore:  # fmt: skip
    """Return the masked-LM loss of an encoder on the token data set `prefix`, read from its first token to its last;
    every token but special ones is masked and predicted once.

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
    return sum_window_losses(losses, len(windows), prefix, model, seq_length, per_sample)


class MaskedLmWindows:
    """Windows of `seq_length` tokens of a data set, each between the begin and end tokens that the tokenizer adds.

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
            find_unmaskable_tokens(tokenizer, tokenizer.eos_id, size),
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
        x = model(model.embed_inputs(tokens, positions), model.make_forward_context(positions))
        _, losses = model.compute_token_loss(x, labels, weights.float())
        total += losses[weights].double().sum().item()
    return total, maskable.size
