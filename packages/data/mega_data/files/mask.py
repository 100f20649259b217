"""The mask beside a token data set: a byte for each token, its weight in the loss as `ChatInfo.one` measures it."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.files.indexed import CHUNK, IndexedReader, bin_path, idx_path, mask_prefix
from mega_data.files.info import read_info


def open_mask(reader: IndexedReader) -> IndexedReader:
    """The mask of a data set: its `tokens` are the bytes of all tokens, uint8 [num_tokens].

    Raises:
        DataError: when it has no mask, or that is of other sequences.
    """
    prefix = mask_prefix(reader.prefix)
    if not idx_path(prefix).exists():
        raise DataError(
            f"{reader.prefix}: has no mask ({idx_path(prefix)}), which says what counts in the loss",
            hint="make it with mega data preprocess --kind conversations",
        )
    mask = IndexedReader(prefix)
    if mask.dtype != np.uint8 or not np.array_equal(mask.lengths, reader.lengths):
        raise DataError(f"{prefix}: not a mask of {reader.prefix}: its sequences are others", hint="make both anew")
    return mask


class LossWeights:
    """The mask of a data set as weights in the loss, fp32. It is opened when something is asked of it.

    A mask that other tools made is of 0 and 1.

    Raises:
        DataError: on opening, as `open_mask`; when nothing counts, or everything though only answers should.
    """

    def __init__(self, reader: IndexedReader) -> None:
        self._reader = reader

    @cached_property
    def _opened(self) -> tuple[IndexedReader, int]:
        """The mask, and the byte that stands for weight 1."""
        info = read_info(self._reader.prefix)
        mask, chat = open_mask(self._reader), info.chat if info else None
        if chat is None or chat.loss_on != "all":
            _check_bytes(mask)
        return mask, chat.one if chat else 1

    @property
    def fingerprint(self) -> str:
        """Of the bytes and of what they stand for."""
        mask, one = self._opened
        return f"{mask.fingerprint}/{one}"

    def __getitem__(self, tokens: slice) -> npt.NDArray[np.float32]:
        mask, one = self._opened
        return mask.tokens[tokens].astype(np.float32) / np.float32(one)


def _check_bytes(mask: IndexedReader) -> None:
    """Refuse a mask that hides nothing, or everything. It is read up to the first difference, which is near."""
    some, every = False, True
    for start in range(0, mask.num_tokens, CHUNK):
        counts = mask.tokens[start : start + CHUNK] > 0
        some, every = some or bool(counts.any()), every and bool(counts.all())
        if some and not every:
            return
    raise DataError(
        f"{bin_path(mask.prefix)}: counts "
        + ("every token in the loss, those of questions too" if some else "no token in the loss"),
        hint="make it anew, with a chat template that marks answers" + (", or with --loss-on all" if some else ""),
    )


def kind_of(reader: IndexedReader) -> str:
    """What a data set holds: `text`, `conversations` or `pairs`."""
    if not idx_path(mask_prefix(reader.prefix)).exists():
        return "text"
    info = read_info(reader.prefix)
    return info.chat.kind if info and info.chat else "conversations"
