"""Training targets: the tokens of a document or of a run's sample, with the loss weight of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.chat.labeled_records import read_text_label
from mega_data.kinds.bert_samples import BertSample
from mega_data.kinds.dataset_kind import TrainingSample
from mega_data.kinds.t5_samples import T5Sample
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.loss_mask import LossWeights, read_dataset_kind
from mega_data.tokenizer import Tokenizer

BEFORE = 4  # preceding tokens that are decoded together with a token, for context-dependent decoders


@dataclass(frozen=True)
class DisplayedToken:
    """Token of a displayed sample: id, text (None without a tokenizer), loss weight as a label, and position.
    The text is the token's name if it is not a whole character.
    """

    id: int
    text: str | None
    weight: float
    position: int


@dataclass(frozen=True)
class DisplayedPart:
    """Named section of a displayed sample: a document, a segment of a document, or padding."""

    name: str
    tokens: list[DisplayedToken]


def split_document_for_display(prefix: Path, number: int, tokenizer: Tokenizer | None) -> list[DisplayedPart]:
    """Return the sequences of document `number` of a data set for display.
    There is usually one, for a preference pair the chosen and the rejected one.

    Raises:
        DataError: if there is no such document, or the data set cannot be used.
    """
    reader = IndexedReader(prefix)
    documents = reader.document_index.size - 1
    if not 0 <= number < documents:
        raise DataError(f"{reader.prefix}: no document {number}; its {documents:,} documents are numbered from 0")
    kind = read_dataset_kind(reader)
    weights = LossWeights(reader) if kind in ("conversations", "pairs") else None
    first, last = reader.document_index[number : number + 2].tolist()
    parts = []
    if kind in ("labels", "token_labels"):
        return [_show_labeled_document(reader, number, first, kind, tokenizer)]
    for sequence in range(first, last):
        begin, ids = int(reader.pointers[sequence]) // reader.dtype.itemsize, reader.read_sequence(sequence)
        label_weights = np.ones(ids.size) if weights is None else weights[slice(begin, begin + ids.size)]
        name = ("chosen", "rejected")[sequence - first] if kind == "pairs" else f"sequence {sequence}"
        parts.append(_build_part(f"document {number}, {name}", ids, label_weights[1:], tokenizer))
    return parts


def _show_labeled_document(
    reader: IndexedReader, number: int, first: int, kind: str, tokenizer: Tokenizer | None
) -> DisplayedPart:
    """Return a labeled text for display, with its label in the name or, for labels of tokens, label + 1 as weights."""
    ids, labels = reader.read_sequence(first), reader.read_sequence(first + 1)
    by_token = kind == "token_labels"
    name = f"document {number}" + ("" if by_token else f", label {read_text_label(labels):g}")
    return _select_tokens(name, ids >= 0, ids, labels.astype(np.float64) if by_token else np.ones(ids.size), tokenizer)


def split_sample_for_display(
    sample: TrainingSample | BertSample | T5Sample, tokenizer: Tokenizer | None
) -> list[DisplayedPart]:
    """Return a training sample for display as sections, one per document.
    Each section is followed by its last label, which is not an input.

    Neighbors of chunks follow as parts. For BERT the parts are the segments and the labels, for T5 the inputs of encoder
    and decoder and the labels.
    """
    if isinstance(sample, BertSample):
        return _show_bert(sample, tokenizer)
    if isinstance(sample, T5Sample):
        return _show_t5(sample, tokenizer)
    if sample.targets is not None or sample.group_size is not None:
        return _show_labeled_sample(sample, tokenizer)
    ids = np.zeros(sample.tokens.size, np.int32) if sample.document_ids is None else sample.document_ids
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), ids.size]
    parts = []
    for number, (begin, end) in enumerate(pairwise(edges)):
        span = slice(begin, end)
        tokens = np.append(sample.tokens[span], sample.labels[end - 1])
        padding = not sample.loss_weights[span].any() and np.array_equal(sample.tokens[span], sample.labels[span])
        name = "padding" if padding else f"document {number}"
        parts.append(_build_part(name, tokens, sample.loss_weights[span], tokenizer, sample.position_ids[span]))
    return parts if sample.neighbors is None else [*parts, *_show_neighbors(sample.neighbors, tokenizer)]


def _show_labeled_sample(sample: TrainingSample, tokenizer: Tokenizer | None) -> list[DisplayedPart]:
    """Return the texts of a sample with labels or groups: the name has the label, or the labels of the tokens."""
    assert sample.document_ids is not None
    parts = []
    for number in range(int(sample.document_ids.max()) + 1):
        mask = sample.document_ids == number
        name, counts = f"document {number}", sample.loss_weights[mask] > 0
        if sample.group_size is not None:
            place = number % sample.group_size
            name = f"group {number // sample.group_size}, {('query', 'positive')[place] if place < 2 else 'negative'}"
        elif counts.any():
            labels = sample.targets[mask][counts] if sample.targets is not None else counts
            one = (labels == labels[0]).all() and counts.all()
            name += f", label {labels[0]:g}" if one else f", labels {' '.join(f'{label:g}' for label in labels)}"
        if counts.any() or (sample.position_ids[mask][0] == 0 and number == 0):
            parts.append(_select_tokens(name, mask, sample.tokens, sample.loss_weights, tokenizer))
    return parts


def _show_neighbors(neighbors: npt.NDArray[np.int64], tokenizer: Tokenizer | None) -> list[DisplayedPart]:
    """Return the neighbors of all chunks, int64 [S / m, K, 2m], as parts."""
    width = neighbors.shape[2] // 2
    parts = []
    for (chunk, number), first in np.ndenumerate(neighbors[:, :, 0]):
        if first >= 0:
            ids = neighbors[chunk, number][neighbors[chunk, number] >= 0]
            name = f"neighbor {number} of the chunk at {chunk * width}-{(chunk + 1) * width - 1}"
            parts.append(_build_part(name, ids, np.zeros(ids.size - 1), tokenizer))
    return parts


def _show_bert(sample: BertSample, tokenizer: Tokenizer | None) -> list[DisplayedPart]:
    present, predicted = sample.padding_mask, sample.loss_weights > 0
    segments = [(name, present & (sample.token_types == kind)) for kind, name in enumerate(("segment A", "segment B"))]
    parts = [
        _select_tokens(name, mask, sample.tokens, sample.loss_weights, tokenizer)
        for name, mask in segments
        if mask.any()
    ]
    return [*parts, _select_tokens("labels", predicted, sample.labels, sample.loss_weights, tokenizer)]


def _show_t5(sample: T5Sample, tokenizer: Tokenizer | None) -> list[DisplayedPart]:
    encoder_weights, decoder_weights = np.zeros(sample.encoder_tokens.size), np.zeros(sample.decoder_tokens.size)
    return [
        _select_tokens("encoder", sample.encoder_mask, sample.encoder_tokens, encoder_weights, tokenizer),
        _select_tokens("decoder", sample.decoder_mask, sample.decoder_tokens, decoder_weights, tokenizer),
        _select_tokens("labels", sample.loss_weights > 0, sample.labels, sample.loss_weights, tokenizer),
    ]


def _select_tokens(
    name: str,
    mask: npt.NDArray[np.bool_],
    ids: npt.NDArray[np.integer],
    weights: npt.NDArray[np.floating],
    tokenizer: Tokenizer | None,
) -> DisplayedPart:
    """Return the tokens at the positions of `mask` with their weights."""
    tokens = ids[mask].tolist()
    texts = [None] * len(tokens) if tokenizer is None else decode_each_token(tokens, tokenizer)
    rows = zip(tokens, texts, weights[mask].tolist(), np.flatnonzero(mask).tolist(), strict=True)
    return DisplayedPart(name, [DisplayedToken(*row) for row in rows])


def _build_part(
    name: str,
    ids: npt.NDArray[np.integer],
    weights: npt.NDArray[np.floating],
    tokenizer: Tokenizer | None,
    positions: npt.NDArray[np.int64] | None = None,
) -> DisplayedPart:
    """Build a part from tokens, and the `weights` and `positions` of the labels: all tokens except the first."""
    tokens = ids.tolist()
    texts = [None] * len(tokens) if tokenizer is None else decode_each_token(tokens, tokenizer)
    token_weights = [0.0, *weights.tolist()]
    start = 0 if positions is None else int(positions[0])
    return DisplayedPart(name, [
        DisplayedToken(*fields, start + i) for i, fields in enumerate(zip(tokens, texts, token_weights, strict=True))
    ])  # fmt: skip


def decode_each_token(ids: Sequence[int], tokenizer: Tokenizer) -> list[str | None]:
    """Return the text that each token adds to the previous ones, or `‹token›` if that is not a whole character.

    For an incomplete character, or a token without text, it is the token's name.
    """
    texts: list[str | None] = []
    for position, token in enumerate(ids):
        before = ids[max(0, position - BEFORE) : position]
        text = tokenizer.decode([*before, token])[len(tokenizer.decode(before)) :]
        incomplete = not text or "\N{REPLACEMENT CHARACTER}" in text
        texts.append(f"‹{tokenizer.backend.id_to_token(token) or token}›" if incomplete else text)
    return texts
