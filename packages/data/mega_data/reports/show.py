"""What a model is taught: the tokens of a document or of a run's sample, which of them count in the loss, and how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.files.indexed import IndexedReader
from mega_data.files.mask import LossWeights, kind_of
from mega_data.kinds.base import Sample
from mega_data.kinds.bert import BertSample
from mega_data.kinds.t5 import T5Sample
from mega_data.tokenizer import Tokenizer

BEFORE = 4  # tokens that are decoded with one, for decoders to which its neighbours matter


@dataclass(frozen=True)
class Token:
    """A token, its text (its name where it is no whole character; None without a tokenizer), and its weight as a label."""

    id: int
    text: str | None
    weight: float
    position: int


@dataclass(frozen=True)
class Part:
    """Tokens that see each other: a document, or what a sample has of it, or padding."""

    name: str
    tokens: list[Token]


def show_document(prefix: Path, number: int, tokenizer: Tokenizer | None) -> list[Part]:
    """The sequences of a document of a data set: one, or a pair's chosen and rejected one.

    Raises:
        DataError: when there is no such document, or the data set cannot be used.
    """
    reader = IndexedReader(prefix)
    documents = reader.document_index.size - 1
    if not 0 <= number < documents:
        raise DataError(f"{reader.prefix}: no document {number}; its {documents:,} are numbered from 0")
    kind = kind_of(reader)
    weights = None if kind == "text" else LossWeights(reader)
    first, last = reader.document_index[number : number + 2].tolist()
    parts = []
    for sequence in range(first, last):
        begin, ids = int(reader.pointers[sequence]) // reader.dtype.itemsize, reader.read(sequence)
        own = np.ones(ids.size) if weights is None else weights[slice(begin, begin + ids.size)]
        pair = ("chosen", "rejected")[sequence - first] if kind == "pairs" else f"sequence {sequence}"
        parts.append(_part(f"document {number}, {pair}", ids, own[1:], tokenizer))
    return parts


def show_sample(sample: Sample | BertSample | T5Sample, tokenizer: Tokenizer | None) -> list[Part]:
    """What the model gets as a sample, document by document; of each also the last label, which is no input.

    Of chunks with neighbours also these; of BERT's the segments, and what is to be guessed where; of T5's what encoder and decoder get, and the labels.
    """
    if isinstance(sample, BertSample):
        return _bert(sample, tokenizer)
    if isinstance(sample, T5Sample):
        return _t5(sample, tokenizer)
    ids = np.zeros(sample.tokens.size, np.int32) if sample.document_ids is None else sample.document_ids
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), ids.size]
    parts = []
    for number, (begin, end) in enumerate(pairwise(edges)):
        own = slice(begin, end)
        tokens = np.append(sample.tokens[own], sample.labels[end - 1])
        padding = not sample.loss_weights[own].any() and np.array_equal(sample.tokens[own], sample.labels[own])
        name = "padding" if padding else f"document {number}"
        parts.append(_part(name, tokens, sample.loss_weights[own], tokenizer, sample.position_ids[own]))
    return parts if sample.neighbors is None else [*parts, *_neighbors(sample.neighbors, tokenizer)]


def _neighbors(found: npt.NDArray[np.int64], tokenizer: Tokenizer | None) -> list[Part]:
    """Those of each chunk that has any."""
    width = found.shape[2] // 2
    parts = []
    for (chunk, number), first in np.ndenumerate(found[:, :, 0]):
        if first >= 0:
            ids = found[chunk, number][found[chunk, number] >= 0]
            name = f"neighbour {number} of the chunk at {chunk * width}-{(chunk + 1) * width - 1}"
            parts.append(_part(name, ids, np.zeros(ids.size - 1), tokenizer))
    return parts


def _bert(sample: BertSample, tokenizer: Tokenizer | None) -> list[Part]:
    present, guessed = sample.padding_mask, sample.loss_weights > 0
    segments = [(name, present & (sample.token_types == kind)) for kind, name in enumerate(("segment A", "segment B"))]
    parts = [_at(name, own, sample.tokens, sample.loss_weights, tokenizer) for name, own in segments if own.any()]
    return [*parts, _at("to be guessed", guessed, sample.labels, sample.loss_weights, tokenizer)]


def _t5(sample: T5Sample, tokenizer: Tokenizer | None) -> list[Part]:
    nothing = np.zeros(sample.encoder_tokens.size), np.zeros(sample.decoder_tokens.size)
    return [
        _at("encoder", sample.encoder_mask, sample.encoder_tokens, nothing[0], tokenizer),
        _at("decoder", sample.decoder_mask, sample.decoder_tokens, nothing[1], tokenizer),
        _at("labels", sample.loss_weights > 0, sample.labels, sample.loss_weights, tokenizer),
    ]


def _at(
    name: str,
    own: npt.NDArray[np.bool_],
    ids: npt.NDArray[np.integer],
    weights: npt.NDArray[np.floating],
    tokenizer: Tokenizer | None,
) -> Part:
    """The tokens at some places, each with its own weight."""
    tokens = ids[own].tolist()
    texts = [None] * len(tokens) if tokenizer is None else texts_of(tokens, tokenizer)
    rows = zip(tokens, texts, weights[own].tolist(), np.flatnonzero(own).tolist(), strict=True)
    return Part(name, [Token(*row) for row in rows])


def _part(
    name: str,
    ids: npt.NDArray[np.integer],
    weights: npt.NDArray[np.floating],
    tokenizer: Tokenizer | None,
    positions: npt.NDArray[np.int64] | None = None,
) -> Part:
    """`weights` and `positions` of the labels, one fewer than the tokens; the first is nobody's label."""
    tokens = ids.tolist()
    texts = [None] * len(tokens) if tokenizer is None else texts_of(tokens, tokenizer)
    weights_of = [0.0, *weights.tolist()]
    start = 0 if positions is None else int(positions[0])
    return Part(name, [
        Token(*one, start + place) for place, one in enumerate(zip(tokens, texts, weights_of, strict=True))
    ])  # fmt: skip


def texts_of(ids: Sequence[int], tokenizer: Tokenizer) -> list[str | None]:
    """The text that each token adds to those before it; of what is no whole character or no text, the token's name."""
    texts: list[str | None] = []
    for place, token in enumerate(ids):
        before = ids[max(0, place - BEFORE) : place]
        text = tokenizer.decode([*before, token])[len(tokenizer.decode(before)) :]
        broken = not text or "\N{REPLACEMENT CHARACTER}" in text
        texts.append(f"‹{tokenizer.backend.id_to_token(token) or token}›" if broken else text)
    return texts
