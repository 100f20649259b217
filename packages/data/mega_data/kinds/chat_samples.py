"""Samples of conversations, packed like documents and weighted by their loss mask, and of preference pairs.

A pair is two documents of a sample, number 2 i the chosen one and 2 i + 1 the rejected one, with the weights of their
loss masks. Unlike other documents, they include their last token in the inputs, with label weight 0, because a reward
model scores them there. A preference loss thus compares sums over neighboring documents, in any layout; the padding of
a sample is a document without weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.kinds.dataset_kind import DatasetContext
from mega_data.kinds.image_chat_samples import ImageChatSamples
from mega_data.kinds.packed_documents import DocumentPieces, PackedSamples, build_packed_samples, reject_megatron_order
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.token_files.image_references import has_images
from mega_data.token_files.indexed_reader import IndexedReader, Tokens
from mega_data.token_files.loss_mask import LossWeights


def build_conversation_samples(part: DatasetPart, setting: DatasetContext, num_samples: int) -> PackedSamples:
    """Return the packed samples of a data set part of conversations (dataset kind `conversations`), with images if the
    data set has them.

    Raises:
        ConfigError: in order `megatron`, which does not support packing.
        DataError: on the first sample, without a loss mask, or if it selects no token or every token; for images that
            the model does not support.
    """
    if has_images(part.reader.prefix):
        reject_megatron_order(part, setting)
        return ImageChatSamples(part, setting, weights=LossWeights(part.reader))
    return build_packed_samples(part, setting, num_samples, weights=LossWeights(part.reader))


class PreferencePairSamples(PackedSamples):
    """Packed samples of whole preference pairs (chosen and rejected answer). Pairs that do not fit a sample are skipped
    and counted.
    """

    @property
    def _packing_rule(self) -> str:
        return "pairs to the last token"

    def _list_pieces(self, reader: IndexedReader) -> DocumentPieces:
        bounds = reader.document_index
        first, last = np.searchsorted(bounds, [self._part.first, self._part.last])
        if (np.diff(bounds[first : last + 1]) != 2).any():
            raise DataError(
                f"{reader.prefix}: data.kind = pairs requires documents of two sequences, and some have another number",
                hint="build the data set with mega data preprocess --kind pairs",
            )
        part = slice(self._part.first, self._part.last)
        sizes = reader.lengths[part].astype(np.int64).reshape(-1, 2)
        starts = reader.pointers[part].reshape(-1, 2) // reader.dtype.itemsize
        fits = sizes.sum(1) <= self._seq_length
        if not fits.any():
            raise DataError(
                f"{reader.prefix}: none of its {fits.size} pairs fits into data.seq_length = {self._seq_length}",
                hint="increase data.seq_length: both answers of a pair, each with its prompt, are in one sample",
            )
        summary = f"{(~fits).sum()} of {fits.size} pairs exceed seq_length = {self._seq_length} and are left out"
        return DocumentPieces(starts[fits], sizes[fits], summary)

    def _read_documents(self, k: int, starts: list[int], sizes: list[int]) -> list[Tokens]:
        tokens = self._part.reader.tokens
        return [np.append(tokens[at : at + size], tokens[at]) for at, size in zip(starts, sizes, strict=True)]

    def _read_label_weights(self, at: int, size: int) -> npt.NDArray[np.float32]:
        return np.append(super()._read_label_weights(at, size - 1), np.float32(0))


def build_preference_pairs(part: DatasetPart, setting: DatasetContext, _: int) -> PreferencePairSamples:
    """Return the packed samples of a data set part of preference pairs (dataset kind `pairs`).

    Raises:
        ConfigError: as `reject_megatron_order`.
        DataError: on the first sample, without a loss mask, or if it selects no token.
    """
    reject_megatron_order(part, setting)
    return PreferencePairSamples(part, setting, weights=LossWeights(part.reader))
