"""Preference pairs: a chosen and a rejected conversation, packed side by side.

A pair is two documents of a sample, number 2 i the chosen one and 2 i + 1 the rejected one, with the weights of their masks.
Unlike other documents they have their last token among the inputs too, without a label that counts: that is where a reward
model scores them. So the sums that a preference loss compares are those of neighbouring documents, in any layout; what is
left of a sample is a document without weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.files.indexed import IndexedReader, Tokens
from mega_data.files.mask import LossWeights
from mega_data.kinds.base import Setting
from mega_data.kinds.packed import PackedSamples, Pieces, check_order
from mega_data.order.parts import Part


class PairSamples(PackedSamples):
    """Samples of whole pairs. Those of which a sample has no room for both are left out, and counted."""

    @property
    def _rule(self) -> str:
        return "pairs to the last token"

    def _pieces(self, reader: IndexedReader) -> Pieces:
        bounds = reader.document_index
        first, last = np.searchsorted(bounds, [self._part.first, self._part.last])
        if (np.diff(bounds[first : last + 1]) != 2).any():
            raise DataError(
                f"{reader.prefix}: a pair is a document of two sequences, and others are among these",
                hint="make it with mega data preprocess --kind pairs",
            )
        own = slice(self._part.first, self._part.last)
        sizes = reader.lengths[own].astype(np.int64).reshape(-1, 2)
        starts = reader.pointers[own].reshape(-1, 2) // reader.dtype.itemsize
        fits = sizes.sum(1) <= self._seq_length
        if not fits.any():
            raise DataError(
                f"{reader.prefix}: none of its {fits.size} pairs fits into data.seq_length = {self._seq_length}",
                hint="both answers of a pair, with what is asked, lie in one sample",
            )
        told = f"{(~fits).sum()} of {fits.size} pairs have no room in seq_length = {self._seq_length} and are left out"
        return Pieces(starts[fits], sizes[fits], told)

    def _documents(self, k: int, starts: list[int], sizes: list[int]) -> list[Tokens]:
        tokens = self._part.reader.tokens
        return [np.append(tokens[at : at + size], tokens[at]) for at, size in zip(starts, sizes, strict=True)]

    def _weights_of(self, at: int, size: int) -> npt.NDArray[np.float32]:
        return np.append(super()._weights_of(at, size - 1), np.float32(0))


def pairs(part: Part, setting: Setting, _: int) -> PairSamples:
    """The kind `pairs`.

    Raises:
        ConfigError: as `check_order`.
        DataError: on the first sample, without a mask, or when that counts nothing.
    """
    check_order(part, setting)
    return PairSamples(part, setting, weights=LossWeights(part.reader))
