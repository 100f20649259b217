"""Statistics of a token data set beyond counts: duplicates, frequent n-grams and languages.

Exact duplicates are looked for in all of it; all else in a sample of documents spread evenly over it.
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

SAMPLE = 1 << 22  # tokens that are looked at
LONGEST = 1 << 14  # of one document
LANGUAGES = 1000  # documents whose language is told
SHINGLE = 8  # tokens


@dataclass(frozen=True)
class DuplicateCounts:
    """Sequences, out of `of`, that repeat an earlier one: exactly, and nearly (None: not measured) among the `sampled`
    ones.
    """

    of: int
    exact: int
    exact_tokens: int
    sampled: int
    near: int | None


@dataclass(frozen=True)
class FrequentNgram:
    """Run of tokens, its number of occurrences in the sample, and its text if a tokenizer is available."""

    ids: list[int]
    count: int
    text: str | None


def sample_sequences(reader: IndexedReader) -> list[Tokens]:
    """Return the beginnings of sequences spread over a data set, about `SAMPLE` tokens in all, or all of a smaller one."""
    count = len(reader)
    if reader.num_tokens > SAMPLE:
        count = max(1, int(SAMPLE / np.minimum(reader.lengths, LONGEST).mean()))
    numbers = np.unique(np.linspace(0, max(0, len(reader) - 1), count).astype(np.int64))
    return (
        [reader.read_sequence(int(i), 0, min(LONGEST, int(reader.lengths[i]))) for i in numbers] if len(reader) else []
    )


def count_duplicates(reader: IndexedReader, sampled: Sequence[Tokens]) -> DuplicateCounts:
    """Count sequences that repeat an earlier one: exactly, and nearly by MinHash if rensa is installed."""
    hashes = np.zeros((len(reader), 2), np.uint64)
    with ProgressBar("looking for duplicates", total=len(reader) or None, unit="sequences") as bar:
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
    """Return the number of sequences similar or equal to an earlier one; None without rensa."""
    settings = MinHashConfig(ngram=SHINGLE)
    sets = [hash_shingles(hash_numbers(tokens), settings) for tokens in sequences]
    try:
        found = compute_signatures(sets, settings)
    except MissingPackageError as error:
        logger.warning("near duplicates are not looked for: %s", error.message)
        return None
    numbers = np.arange(len(found))
    return int((find_near_leaders(found, settings, numbers) != numbers).sum())


def find_frequent_ngrams(sequences: Sequence[Tokens], n: int, count: int) -> list[tuple[list[int], int]]:
    """Return the `count` most frequent runs of `n` tokens within sequences that occur at least twice, with their
    numbers of occurrences.

    Of runs that overlap where they first stand only the most frequent is taken: a phrase is shown once.
    """
    if not sequences:
        return []
    flat = np.concatenate(sequences)
    hashes = hash_ngrams(hash_numbers(flat), n)
    which = np.repeat(np.arange(len(sequences)), [len(tokens) for tokens in sequences])
    within = np.flatnonzero(which[: hashes.size] == which[n - 1 :][: hashes.size])
    _, first, counts = np.unique(hashes[within], return_index=True, return_counts=True)
    found: list[tuple[int, int]] = []
    for i in np.lexsort((first, -counts)):
        start = int(within[first[i]])
        if len(found) == count or counts[i] < 2:
            break
        if all(abs(start - other) >= n for other, _ in found):
            found.append((start, int(counts[i])))
    return [(flat[start : start + n].tolist(), times) for start, times in found]


def count_languages(texts: Iterable[str]) -> dict[str, int] | None:
    """Return the number of texts per language, by ISO 639-1 code, the most frequent first; None without lingua."""
    try:
        detect = load_lingua_detector()
    except MissingPackageError as error:
        logger.warning("languages are not told: %s", error)
        return None
    with ProgressBar("telling languages", unit="texts") as bar:
        found: Counter[str] = Counter()
        for text in texts:
            code, confidence = detect(text)
            found[code if confidence >= 0.5 else "und"] += 1
            bar.advance(1)
    return dict(found.most_common())
