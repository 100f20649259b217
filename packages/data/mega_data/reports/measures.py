"""What there is to know of a token data set beyond its counts: what repeats, and in which languages it is.

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
from mega_common.log import ProgressBar, logger
from mega_data.cleaning.config import MinHash
from mega_data.cleaning.duplicates import exact_leaders, near_leaders
from mega_data.cleaning.fingerprints import shingles, sketched
from mega_data.cleaning.language import lingua
from mega_data.cleaning.words import mixed, ngrams
from mega_data.files.indexed import IndexedReader

Tokens = npt.NDArray[Any]

SAMPLE = 1 << 22  # tokens that are looked at
LONGEST = 1 << 14  # of one document
LANGUAGES = 1000  # documents whose language is told
SHINGLE = 8  # tokens


@dataclass(frozen=True)
class Duplicates:
    """Sequences, out of `of`, that stood before: exactly, and nearly (None: not looked for) among the `sampled` ones."""

    of: int
    exact: int
    exact_tokens: int
    sampled: int
    near: int | None


@dataclass(frozen=True)
class NGram:
    """A run of tokens, how often it stands in the sample, and its text where a tokenizer is at hand."""

    ids: list[int]
    count: int
    text: str | None


def sample(reader: IndexedReader) -> list[Tokens]:
    """The begins of sequences spread over a data set, about `SAMPLE` tokens in all, or all of a smaller one."""
    count = len(reader)
    if reader.num_tokens > SAMPLE:
        count = max(1, int(SAMPLE / np.minimum(reader.lengths, LONGEST).mean()))
    numbers = np.unique(np.linspace(0, max(0, len(reader) - 1), count).astype(np.int64))
    return [reader.read(int(i), 0, min(LONGEST, int(reader.lengths[i]))) for i in numbers] if len(reader) else []


def duplicates(reader: IndexedReader, sampled: Sequence[Tokens]) -> Duplicates:
    """How many sequences repeat an earlier one: token for token, and nearly, by MinHash where rensa is installed."""
    hashes = np.zeros((len(reader), 2), np.uint64)
    with ProgressBar("looking for duplicates", total=len(reader) or None, unit="sequences") as bar:
        for i in range(len(reader)):
            digest = xxhash.xxh3_128_digest(reader.read(i).data)
            hashes[i] = np.frombuffer(digest, np.uint64)
            bar.advance(1)
    again = exact_leaders(hashes) != np.arange(len(hashes))
    return Duplicates(
        of=len(reader), exact=int(again.sum()), exact_tokens=int(reader.lengths[again].sum(dtype=np.int64)),
        sampled=len(sampled), near=near_duplicates(sampled),
    )  # fmt: skip


def near_duplicates(sequences: Sequence[Tokens]) -> int | None:
    """How many of the sequences are like an earlier one, those equal to it included; None without rensa."""
    settings = MinHash(ngram=SHINGLE)
    sets = [shingles(mixed(tokens), settings) for tokens in sequences]
    try:
        found = sketched(sets, settings)
    except MissingPackageError as error:
        logger.warning("near duplicates are not looked for: %s", error.message)
        return None
    numbers = np.arange(len(found))
    return int((near_leaders(found, settings, numbers) != numbers).sum())


def frequent_ngrams(sequences: Sequence[Tokens], n: int, count: int) -> list[tuple[list[int], int]]:
    """The `count` most frequent runs of `n` tokens within sequences, with how often they stand there; twice at least.

    Of runs that overlap where they first stand only the most frequent is taken: a phrase is shown once.
    """
    if not sequences:
        return []
    flat = np.concatenate(sequences)
    hashes = ngrams(mixed(flat), n)
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


def languages(texts: Iterable[str]) -> dict[str, int] | None:
    """How many texts are in which language, by ISO 639-1 code, the most frequent first; None without lingua."""
    try:
        detect = lingua()
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
