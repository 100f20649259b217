"""Statistics of a token data set beyond counts: duplicates, frequent n-grams and languages.

Exact duplicates are counted in the whole data set; all other statistics use an evenly spaced sample of documents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import MissingPackageError
from mega_common.progress_logging import ProgressBar, logger
from mega_data.cleaning.clean_config import MinHashConfig
from mega_data.cleaning.duplicate_detection import (
    compute_signatures,
    find_exact_leaders,
    find_near_leaders,
    hash_shingles,
)
from mega_data.cleaning.language_detection import load_lingua_detector
from mega_data.cleaning.text_words import hash_ngrams, hash_numbers
from mega_data.token_files.indexed_reader import IndexedReader

Tokens = npt.NDArray[Any]

SAMPLE = 1 << 22  # tokens of the sample
LONGEST = 1 << 14  # tokens of one document
LANGUAGES = 1000  # documents for language detection
SHINGLE = 8  # tokens


@dataclass(frozen=True)
class DuplicateCounts:
    """Numbers of sequences, out of `of`, that repeat an earlier one: exactly, and nearly (None if not measured) among
    the `sampled` ones.
    """

    of: int
    exact: int
    exact_tokens: int
    sampled: int
    near: int | None


@dataclass(frozen=True)
class FrequentNgram:
    """Frequent run of tokens in a sample of a data set: ids, number of occurrences, and text if a tokenizer is
    available.
    """

    ids: list[int]
    count: int
    text: str | None


def sample_sequences(reader: IndexedReader) -> list[Tokens]:
    """Return the beginnings of sequences spread evenly over a data set, about `SAMPLE` (4 Mi) tokens in all, or of all
    sequences of a smaller data set.
    """
    count = len(reader)
    if reader.num_tokens > SAMPLE:
        count = max(1, int(SAMPLE / np.minimum(reader.lengths, LONGEST).mean()))
    numbers = np.unique(np.linspace(0, max(0, len(reader) - 1), count).astype(np.int64))
    return (
        [reader.read_sequence(int(i), 0, min(LONGEST, int(reader.lengths[i]))) for i in numbers] if len(reader) else []
    )


def count_duplicates(reader: IndexedReader, sampled: Sequence[Tokens]) -> DuplicateCounts:
    """Count the sequences of a data set that exactly repeat an earlier one, and the sequences in `sampled` that nearly
    repeat one, by MinHash if rensa is installed.
    """
    hashes = np.zeros((len(reader), 2), np.uint64)
    with ProgressBar("searching duplicates", total=len(reader) or None, unit="sequences") as bar:
        for i in range(len(reader)):
            digest = xxhash.xxh3_128_digest(reader.read_sequence(i).data)
            hashes[i] = np.frombuffer(digest, np.uint64)
            bar.advance(1)
    again = find_exact_leaders(hashes) != np.arange(len(hashes))
    return DuplicateCounts(
        of=len(reader), exact=int(again.sum()), exact_tokens=int(reader.lengths[again].sum(dtype=np.int64)),
        sampled=len(sampled), near=count_near_duplicates(sampled),
    )  # fmt: skip


def count_near_duplicates(sequences: Sequence[Tokens]) -> int | None:
    """Return the number of sequences similar or equal to an earlier one by MinHash; None if the package rensa is not
    installed.
    """
    settings = MinHashConfig(ngram=SHINGLE)
    sets = [hash_shingles(hash_numbers(tokens), settings) for tokens in sequences]
    try:
        signatures = compute_signatures(sets, settings)
    except MissingPackageError as error:
        logger.warning("near duplicates are not counted: %s", error.message)
        return None
    numbers = np.arange(len(signatures))
    return int((find_near_leaders(signatures, settings, numbers) != numbers).sum())


def find_frequent_ngrams(sequences: Sequence[Tokens], n: int, count: int) -> list[tuple[list[int], int]]:
    """Return the `count` most frequent runs of `n` tokens within sequences, as (ids, number of occurrences); runs that
    occur only once are left out.

    Of runs that overlap at their first occurrence only the most frequent is returned, so that a phrase is shown once.
    """
    if not sequences:
        return []
    flat = np.concatenate(sequences)
    hashes = hash_ngrams(hash_numbers(flat), n)
    owner = np.repeat(np.arange(len(sequences)), [len(tokens) for tokens in sequences])
    within = np.flatnonzero(owner[: hashes.size] == owner[n - 1 :][: hashes.size])
    _, first, counts = np.unique(hashes[within], return_index=True, return_counts=True)
    selected: list[tuple[int, int]] = []
    for i in np.lexsort((first, -counts)):
        start = int(within[first[i]])
        if len(selected) == count or counts[i] < 2:
            break
        if all(abs(start - other) >= n for other, _ in selected):
            selected.append((start, int(counts[i])))
    return [(flat[start : start + n].tolist(), times) for start, times in selected]


def count_languages(texts: Iterable[str]) -> dict[str, int] | None:
    """Return the number of texts per language, by ISO 639-1 code, the most frequent first; None if the package lingua
    is not installed.
    """
    try:
        detect = load_lingua_detector()
    except MissingPackageError as error:
        logger.warning("languages are not detected: %s", error)
        return None
    with ProgressBar("detecting languages", unit="texts") as bar:
        counts: Counter[str] = Counter()
        for text in texts:
            code, confidence = detect(text)
            counts[code if confidence >= 0.5 else "und"] += 1
            bar.advance(1)
    return dict(counts.most_common())
