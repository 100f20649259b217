"""Packed samples of labeled texts, labeled tokens and groups of texts (`mega_data.chat.labeled_records`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.chat.labeled_records import read_text_label
from mega_data.kinds.dataset_kind import DatasetContext, TrainingSample
from mega_data.kinds.packed_documents import WholeDocumentSamples, reject_megatron_order
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.token_files.dataset_info import read_dataset_info
from mega_data.token_files.loss_mask import open_loss_mask


class LabeledSamples(WholeDocumentSamples):
    """Packed samples of whole labeled texts or groups.
    A group's texts are in one sample; what does not fit is left out and counted.

    Raises:
        DataError: on the first sample, if no document fits or the documents have another form.
    """

    _noun = "records"
    _fit_hint = "increase data.seq_length, or lower max_length when the data set is built"

    def __init__(self, part: DatasetPart, setting: DatasetContext) -> None:
        super().__init__(part, setting)
        info = read_dataset_info(part.reader.prefix)
        if info is None or info.chat is None:
            raise DataError(
                f"{part.reader.prefix}: has no description of its labels",
                hint=f"build the data set with mega data preprocess --kind {part.kind}",
            )
        self._texts = 2 + info.chat.negatives if part.kind == "groups" else 1
        self._sequences = self._texts + (part.kind != "groups")  # labels are a sequence, too

    @property
    def _packing_rule(self) -> str:
        return f"{self._part.kind} whole"

    def __getitem__(self, k: int, /) -> TrainingSample:
        starts, sizes = self._locate_pieces(k)
        mask = open_loss_mask(self._part.reader).tokens
        types, targets = np.zeros(self._seq_length, np.int64), np.zeros(self._seq_length, np.float32)
        weights, at = [], 0
        for start, size in zip(starts, sizes, strict=True):
            types[at : at + size] = mask[start : start + size].astype(np.int64) - 1
            targets[at : at + size], counts = self._read_targets(start, size)
            weights.append(counts)
            at += size
        sample = self._build_sample(self._read_documents(k, starts, sizes), weights)
        if self._part.kind == "groups":
            return replace(sample, token_types=types, group_size=self._texts)
        return replace(sample, token_types=types, targets=targets)

    def _read_targets(self, start: int, size: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return the label of each token of a text, and its loss weight: fp32 [size] each."""
        ones = np.ones(size, np.float32)
        if self._part.kind == "groups":
            return np.zeros(size, np.float32), ones
        tokens, after = self._part.reader.tokens, start + size
        if self._part.kind == "labels":
            return ones * np.float32(read_text_label(tokens[after : after + 2])), ones
        labels = tokens[after : after + size].astype(np.float32)
        return np.maximum(labels - 1, 0), (labels > 0).astype(np.float32)


def build_labeled_samples(part: DatasetPart, setting: DatasetContext, _: int) -> LabeledSamples:
    """Return the packed samples of labeled texts, labeled tokens or groups of texts in one data set's share of a split.

    Raises:
        ConfigError: as `reject_megatron_order`.
        DataError: if the data set has no labels.
    """
    reject_megatron_order(part, setting)
    return LabeledSamples(part, setting)
