"""How well an encoder guesses held-out tokens: every token is hidden exactly once, some of a window's at a time.

With a share of 15 % a window is read seven times, each with other tokens hidden: the loss of masked-language-model training,
of all tokens. One at a time, exp of the mean is the pseudo-perplexity of Salazar et al. (2020, arXiv:1910.14659).

Legend: S tokens of a window, special tokens included; R rows, copies of a window with other tokens hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mega_common.errors import DataError
from mega_data.files.indexed import IndexedReader
from mega_data.kinds.masked import mask_token, never_hidden
from mega_data.tokenizer import Tokenizer
from mega_eval.perplexity import Result, added_up, checked_info
from mega_trainer.model.decoder import Decoder

Ints = npt.NDArray[np.int64]
SHARE = 0.15


def evaluate_masked(
    model: Decoder, prefix: Path, seq_length: int, tokenizer: Tokenizer, *, share: float = SHARE, batch_size: int = 8,
    same_tokenizer: bool = True, per_sample: Path | None = None,
) -> Result:  # fmt: skip
    """Score an encoder on the data set `prefix`, read from its first token to its last.

    Args:
        model: in eval mode.
        prefix: the data set, without .bin and .idx.
        seq_length: S; the tokens that the tokenizer begins and ends every text with are among them.
        tokenizer: the model's, for its mask token.
        share: of a window's tokens that are hidden together; 0: one at a time.
        batch_size: rows computed together.
        same_tokenizer: whether the data set must have been made with `tokenizer`.
        per_sample: as in `perplexity.evaluate`.

    Raises:
        DataError: when the data set cannot be used, is not of the model's vocabulary or tokenizer, or has nothing to guess;
            when the tokenizer has no mask token.
        CheckpointError: when a loss is not a number.
    """
    checked_info(prefix, model, seq_length, tokenizer if same_tokenizer else None)
    windows = Windows(prefix, seq_length, tokenizer)
    losses = (_window_loss(model, window, windows, number, share, batch_size) for number, window in enumerate(windows))
    return added_up(losses, len(windows), prefix, model, seq_length, per_sample)


class Windows:
    """The tokens of a data set, so many at a time, between the tokens that begin and end every text of the tokenizer.

    Attributes:
        mask: the token that hides.
        apart: bool [V], tokens that are never hidden.
    """

    def __init__(self, prefix: Path, seq_length: int, tokenizer: Tokenizer) -> None:
        around = tokenizer.encode("", add_special_tokens=True)
        self._around = np.array(around[:1], np.int64), np.array(around[1:], np.int64)
        self._size = seq_length - len(around)
        if self._size < 1:
            raise DataError(
                f"windows of {seq_length} tokens have no room beside the special tokens of {tokenizer.path}"
            )
        self._tokens = IndexedReader(prefix).tokens
        size = max(tokenizer.vocab_size, int(self._tokens.max(initial=0)) + 1)
        self.mask, self.apart = mask_token(tokenizer), never_hidden(tokenizer, tokenizer.eos_id, size)

    def __len__(self) -> int:
        return -(-self._tokens.size // self._size)

    def __iter__(self) -> Iterator[Ints]:
        for start in range(0, self._tokens.size, self._size):
            begin, end = self._around
            yield np.concatenate([begin, self._tokens[start : start + self._size], end]).astype(np.int64)


@torch.inference_mode()
def _window_loss(
    model: Decoder, window: Ints, windows: Windows, number: int, share: float, batch_size: int
) -> tuple[float, int]:
    """The sum of the losses of a window's tokens, in nats, and how many there are."""
    places = np.random.default_rng(number).permutation(np.flatnonzero(~windows.apart[window]))
    rounds = math.ceil(1 / share) if share else places.size
    hidden = [part for part in np.array_split(places, max(rounds, 1)) if part.size]
    rows, at = np.repeat(window[None], len(hidden), 0), np.zeros((len(hidden), window.size), np.bool_)
    for row, part in enumerate(hidden):
        rows[row, part], at[row, part] = windows.mask, True
    positions, total = torch.arange(window.size, device=model.device)[None], 0.0
    for start in range(0, len(rows), batch_size):
        tokens, weights = (torch.from_numpy(each[start : start + batch_size]).to(model.device) for each in (rows, at))
        labels = torch.from_numpy(window).to(model.device).expand(tokens.shape)
        x = model(model.embed(tokens, positions), model.context(positions))
        _, losses = model.loss(x, labels, weights.float())
        total += losses[weights].double().sum().item()
    return total, places.size
