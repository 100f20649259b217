"""A look into a token data set: counts, lengths, frequent tokens, samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mega_common.errors import DataError
from mega_common.log import ProgressBar, logger
from mega_data.files.indexed import CHUNK, IndexedReader
from mega_data.files.info import DataInfo, little_endian, read_info
from mega_data.files.verify import check_tokenizer
from mega_data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Frequent:
    """A token, how often it stands there, and its text where a tokenizer is at hand."""

    id: int
    count: int
    text: str | None


@dataclass(frozen=True)
class Sample:
    """The begin of one sequence."""

    sequence: int
    length: int
    ids: list[int]
    text: str | None


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        lengths: `min`, `median`, `mean` and `max` number of tokens of a sequence.
        histogram: number of sequences by length: key `n` counts the lengths in [n, 2n), key 0 the empty ones.
    """

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    bytes: int
    lengths: dict[str, float]
    histogram: dict[int, int]
    distinct_tokens: int
    frequent: list[Frequent]
    samples: list[Sample]
    info: DataInfo | None


def inspect(
    prefix: Path, tokenizer: Tokenizer | None = None, *, samples: int = 3, frequent: int = 10, head: int = 64
) -> Inspection:
    """Look into a data set; texts are decoded by `tokenizer`, or by the one it was made with if that is still there.

    `samples` sequences spread over the data set are shown by their first `head` tokens.

    Raises:
        DataError: when the data set is damaged or was made by another tokenizer.
    """
    reader = IndexedReader(Path(prefix))
    info = read_info(reader.prefix)
    if tokenizer is None:
        tokenizer = tokenizer_of(info)
    elif info is not None:
        check_tokenizer(reader.prefix, info, tokenizer)
    counts = _token_counts(reader)
    shown = sorted({int(i) for i in np.linspace(0, len(reader) - 1, samples)}) if len(reader) and samples else []
    return Inspection(
        prefix=str(prefix),
        dtype=little_endian(reader.dtype),
        documents=reader.document_index.size - 1,
        sequences=len(reader),
        tokens=reader.num_tokens,
        bytes=reader.tokens.nbytes,
        lengths=_length_summary(reader),
        histogram=_length_histogram(reader),
        distinct_tokens=int(np.count_nonzero(counts)),
        frequent=[
            Frequent(int(token), int(counts[token]), tokenizer.decode([int(token)]) if tokenizer else None)
            for token in np.argsort(-counts, kind="stable")[:frequent]
            if counts[token]
        ],
        samples=[_sample(reader, i, head, tokenizer) for i in shown],
        info=info,
    )


def tokenizer_of(info: DataInfo | None) -> Tokenizer | None:
    """The tokenizer that a data set was made with, if it is still there and unchanged."""
    if info is None or info.tokenizer is None or not Path(info.tokenizer.path).is_file():
        return None
    tokenizer = Tokenizer(Path(info.tokenizer.path))
    if tokenizer.fingerprint == info.tokenizer.fingerprint:
        return tokenizer
    logger.warning("%s changed since the tokens were made: nothing is decoded", tokenizer.path)
    return None


def _token_counts(reader: IndexedReader) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """How often each id occurs, int64 [largest id + 1]."""
    counts = np.zeros(0, np.int64)
    with ProgressBar("counting tokens", total=reader.num_tokens or None, unit="tokens") as bar:
        for start in range(0, reader.num_tokens, CHUNK):
            piece = reader.tokens[start : start + CHUNK]
            if piece.min() < 0:
                raise DataError(f"{reader.prefix}: holds the token {piece.min()}; ids begin at 0")
            more = np.bincount(piece, minlength=counts.size)
            more[: counts.size] += counts
            counts = more
            bar.advance(piece.size)
    return counts


def _length_summary(reader: IndexedReader) -> dict[str, float]:
    lengths = reader.lengths
    if not lengths.size:
        return {}
    return {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": round(float(lengths.mean()), 1),
        "max": int(lengths.max()),
    }


def _length_histogram(reader: IndexedReader) -> dict[int, int]:
    # frexp's exponent is the bit length, exactly, for any int32.
    bits, counts = np.unique(np.frexp(reader.lengths.astype(np.float64))[1], return_counts=True)
    return {1 << (int(bit) - 1) if bit else 0: int(count) for bit, count in zip(bits, counts, strict=True)}


def _sample(reader: IndexedReader, i: int, head: int, tokenizer: Tokenizer | None) -> Sample:
    length = int(reader.lengths[i])
    ids = reader.read(i, 0, min(head, length)).tolist()
    return Sample(i, length, ids, tokenizer.decode(ids) if tokenizer else None)
