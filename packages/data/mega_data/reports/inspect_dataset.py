"""Inspection of a token data set: counts, lengths, frequent tokens, samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar, logger
from mega_data.token_files.dataset_info import DatasetInfo, get_dtype_name, read_dataset_info
from mega_data.token_files.indexed_reader import CHUNK, IndexedReader
from mega_data.token_files.verify_dataset import check_dataset_tokenizer
from mega_data.tokenizer import Tokenizer


@dataclass(frozen=True)
class FrequentToken:
    """Frequent token of a data set: id, number of occurrences, and text if a tokenizer is available."""

    id: int
    count: int
    text: str | None


@dataclass(frozen=True)
class SequenceSample:
    """Beginning of one sequence of a data set: number, length, first token ids, and text if a tokenizer is available."""

    sequence: int
    length: int
    ids: list[int]
    text: str | None


@dataclass(frozen=True)
class DatasetInspection:
    """Result of `inspect_dataset`: size, sequence lengths, frequent tokens and sample sequences of a data set.

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
    frequent: list[FrequentToken]
    samples: list[SequenceSample]
    info: DatasetInfo | None


def inspect_dataset(
    prefix: Path, tokenizer: Tokenizer | None = None, *, samples: int = 3, frequent: int = 10, head: int = 64
) -> DatasetInspection:
    """Return counts, lengths, frequent tokens and sample sequences of a data set.
    Texts are decoded by `tokenizer`, or by the original one if it still exists.

    `samples` evenly spaced sequences are shown by their first `head` tokens.

    Raises:
        DataError: if the data set is damaged, or the tokenizer differs.
    """
    reader = IndexedReader(Path(prefix))
    info = read_dataset_info(reader.prefix)
    if tokenizer is None:
        tokenizer = load_original_tokenizer(info)
    elif info is not None:
        check_dataset_tokenizer(reader.prefix, info, tokenizer)
    counts = _count_tokens(reader)
    shown = sorted({int(i) for i in np.linspace(0, len(reader) - 1, samples)}) if len(reader) and samples else []
    return DatasetInspection(
        prefix=str(prefix),
        dtype=get_dtype_name(reader.dtype),
        documents=reader.document_index.size - 1,
        sequences=len(reader),
        tokens=reader.num_tokens,
        bytes=reader.tokens.nbytes,
        lengths=_summarize_lengths(reader),
        histogram=_build_length_histogram(reader),
        distinct_tokens=int(np.count_nonzero(counts)),
        frequent=[
            FrequentToken(int(token), int(counts[token]), tokenizer.decode([int(token)]) if tokenizer else None)
            for token in np.argsort(-counts, kind="stable")[:frequent]
            if counts[token]
        ],
        samples=[_read_sample(reader, i, head, tokenizer) for i in shown],
        info=info,
    )


def load_original_tokenizer(info: DatasetInfo | None) -> Tokenizer | None:
    """Return the tokenizer that made a data set, or None if its file is unknown, changed or removed.

    It is found by the path in the data set's description.
    """
    if info is None or info.tokenizer is None or not Path(info.tokenizer.path).is_file():
        return None
    tokenizer = Tokenizer(Path(info.tokenizer.path))
    if tokenizer.fingerprint == info.tokenizer.fingerprint:
        return tokenizer
    logger.warning("%s: changed after the data set was written; tokens are not decoded", tokenizer.path)
    return None


def _count_tokens(reader: IndexedReader) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the number of occurrences of each id, int64 [largest id + 1]."""
    counts = np.zeros(0, np.int64)
    with ProgressBar("counting tokens", total=reader.num_tokens or None, unit="tokens") as bar:
        for start in range(0, reader.num_tokens, CHUNK):
            piece = reader.tokens[start : start + CHUNK]
            if piece.min() < 0:
                raise DataError(f"{reader.prefix}: has the token id {piece.min()}; ids must be at least 0")
            more = np.bincount(piece, minlength=counts.size)
            more[: counts.size] += counts
            counts = more
            bar.advance(piece.size)
    return counts


def _summarize_lengths(reader: IndexedReader) -> dict[str, float]:
    lengths = reader.lengths
    if not lengths.size:
        return {}
    return {
        "min": int(lengths.min()),
        "median": float(np.median(lengths)),
        "mean": round(float(lengths.mean()), 1),
        "max": int(lengths.max()),
    }


def _build_length_histogram(reader: IndexedReader) -> dict[int, int]:
    # frexp's exponent is exactly the bit length of any int32.
    bits, counts = np.unique(np.frexp(reader.lengths.astype(np.float64))[1], return_counts=True)
    return {1 << (int(bit) - 1) if bit else 0: int(count) for bit, count in zip(bits, counts, strict=True)}


def _read_sample(reader: IndexedReader, i: int, head: int, tokenizer: Tokenizer | None) -> SequenceSample:
    length = int(reader.lengths[i])
    ids = reader.read_sequence(i, 0, min(head, length)).tolist()
    return SequenceSample(i, length, ids, tokenizer.decode(ids) if tokenizer else None)
