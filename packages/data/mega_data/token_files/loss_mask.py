"""Loss mask of a token data set: one byte per token, its weight in the loss in units of `ChatInfo.one`."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.token_files.dataset_info import read_dataset_info
from mega_data.token_files.indexed_reader import CHUNK, IndexedReader, get_bin_path, get_idx_path, get_loss_mask_prefix


def open_loss_mask(reader: IndexedReader) -> IndexedReader:
    """Return a reader of a data set's loss mask `PREFIX.mask`; a DataError if it is missing or of other sequences.
    The mask's `tokens` are one byte per token of the data set, uint8 [num_tokens].

    Raises:
        DataError: if the mask is missing, or has other sequence lengths.
    """
    prefix = get_loss_mask_prefix(reader.prefix)
    if not get_idx_path(prefix).exists():
        raise DataError(
            f"{reader.prefix}: the loss mask {get_idx_path(prefix)} is missing",
            hint="build the data set with mega data preprocess --kind conversations",
        )
    mask = reader.open_companion(prefix)
    if mask.dtype != np.uint8 or not np.array_equal(mask.lengths, reader.lengths):
        raise DataError(
            f"{prefix}: is not the loss mask of {reader.prefix}: the sequence lengths differ",
            hint="build both again with mega data preprocess",
        )
    return mask


class LossWeights:
    """Loss weights of a data set's tokens, fp32, converted from its loss mask bytes, which are opened on first access.

    A mask from other tools, without `ChatInfo`, has weights 0 and 1.

    Raises:
        DataError: on opening, as `open_loss_mask`; if no token counts, or every token although only answers should.
    """

    def __init__(self, reader: IndexedReader) -> None:
        self._reader = reader

    @cached_property
    def _mask_and_unit(self) -> tuple[IndexedReader, int]:
        """Mask, and the byte of weight 1."""
        info = read_dataset_info(self._reader.prefix)
        mask, chat = open_loss_mask(self._reader), info.chat if info else None
        if chat is None or chat.loss_on != "all":
            _check_bytes(mask)
        return mask, chat.one if chat else 1

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the loss mask's bytes and of the byte that means weight 1."""
        mask, one = self._mask_and_unit
        return f"{mask.fingerprint}/{one}"

    def __getitem__(self, tokens: slice) -> npt.NDArray[np.float32]:
        mask, one = self._mask_and_unit
        return mask.tokens[tokens].astype(np.float32) / np.float32(one)


def _check_bytes(mask: IndexedReader) -> None:
    """Reject a mask that counts no token or every token, read up to the first difference."""
    some, every = False, True
    for start in range(0, mask.num_tokens, CHUNK):
        counts = mask.tokens[start : start + CHUNK] > 0
        some, every = some or bool(counts.any()), every and bool(counts.all())
        if some and not every:
            return
    raise DataError(
        f"{get_bin_path(mask.prefix)}: the loss mask selects "
        + ("every token, including those of questions" if some else "no token"),
        hint="build it again with a chat template that marks answers" + (", or with --loss-on all" if some else ""),
    )


def read_dataset_kind(reader: IndexedReader) -> str:
    """Return the kind of records of a data set, such as `conversations` or `labels`; `text` without a loss mask."""
    if not get_idx_path(get_loss_mask_prefix(reader.prefix)).exists():
        return "text"
    info = read_dataset_info(reader.prefix)
    return info.chat.kind if info and info.chat else "conversations"
