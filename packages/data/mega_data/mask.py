"""The mask beside a token data set: a byte for each token, its weight in the loss as `ChatInfo.one` measures it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.indexed import CHUNK, IndexedReader, bin_path, idx_path, mask_prefix
from mega_data.info import read_info


def open_mask(reader: IndexedReader) -> npt.NDArray[np.uint8]:
    """The bytes of all tokens of a data set, [num_tokens].

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
    return mask.tokens.view(np.uint8)


@dataclass(frozen=True)
class LossWeights:
    """The mask of a data set as weights in the loss.

    Attributes:
        fingerprint: of the bytes and of what they stand for.
    """

    bytes: npt.NDArray[np.uint8]
    one: int
    fingerprint: str

    @classmethod
    def of(cls, reader: IndexedReader) -> LossWeights:
        """Those of a data set. A mask that other tools made is of 0 and 1.

        Raises:
            DataError: as `open_mask`; when nothing counts, or everything though only answers should.
        """
        info = read_info(reader.prefix)
        mask, chat = open_mask(reader), info.chat if info else None
        if chat is None or chat.loss_on != "all":
            _check_bytes(mask, mask_prefix(reader.prefix))
        one = chat.one if chat else 1
        return cls(mask, one, f"{IndexedReader(mask_prefix(reader.prefix)).fingerprint}/{one}")

    def __getitem__(self, tokens: slice) -> npt.NDArray[np.float32]:
        return self.bytes[tokens].astype(np.float32) / np.float32(self.one)


def _check_bytes(mask: npt.NDArray[np.uint8], prefix: Path) -> None:
    """Refuse a mask that hides nothing, or everything. It is read up to the first difference, which is near."""
    some, every = False, True
    for start in range(0, mask.size, CHUNK):
        counts = mask[start : start + CHUNK] > 0
        some, every = some or bool(counts.any()), every and bool(counts.all())
        if some and not every:
            return
    raise DataError(
        f"{bin_path(prefix)}: counts "
        + ("every token in the loss, those of questions too" if some else "no token in the loss"),
        hint="make it anew, with a chat template that marks answers" + (", or with --loss-on all" if some else ""),
    )


def kind_of(reader: IndexedReader) -> str:
    """What a data set holds: `text`, `conversations` or `pairs`."""
    if not idx_path(mask_prefix(reader.prefix)).exists():
        return "text"
    info = read_info(reader.prefix)
    return info.chat.kind if info and info.chat else "conversations"
