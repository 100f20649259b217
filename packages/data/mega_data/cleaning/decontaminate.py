"""Runs of words that a document shares with an evaluation set (Brown et al. 2020, arXiv:2005.14165, appendix C)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mega_common.errors import DataError
from mega_common.log import logger
from mega_data.cleaning.config import Decontaminate
from mega_data.cleaning.verdict import Drop, Record, Rule
from mega_data.cleaning.words import Hashes, Text
from mega_data.reading.readers import texts


def evaluation_ngrams(limits: Decontaminate) -> Hashes:
    """The hashes of all runs of words in the evaluation sets, sorted, uint64.

    Raises:
        DataError: when a set cannot be read or is of shorter texts only.
    """
    count, short, found = 0, 0, [np.zeros(0, np.uint64)]
    for text in _texts(limits):
        ngrams = text.ngrams(limits.ngram)
        count, short = count + 1, short + (not ngrams.size)
        found.append(ngrams)
    if short == count:
        raise DataError(
            f"{', '.join(limits.against)}: no text of {limits.ngram} words or more to look for, of {count}",
            hint="decontaminate.ngram sets the number of words, json_keys where the texts stand",
        )
    if short:
        logger.warning("decontaminate: %d of %d texts are shorter than %d words and not looked for",
                       short, count, limits.ngram)  # fmt: skip
    return np.unique(np.concatenate(found))


def _texts(limits: Decontaminate) -> Iterator[Text]:
    for key in limits.json_keys:
        yield from map(Text, texts(limits.against, key))


def decontaminate(limits: Decontaminate, file: Path) -> Rule:
    """The rule for documents with a run of words whose hash is in `file`, an `.npy` that processes share."""
    known = np.load(file, mmap_mode="r")

    def judge(text: Text, _: Record) -> Drop | None:
        ngrams = text.ngrams(limits.ngram)
        places = np.searchsorted(known, ngrams)
        hits = np.flatnonzero(known[np.minimum(places, known.size - 1)] == ngrams)
        if not hits.size:
            return None
        words = " ".join(text.words[hits[0] : hits[0] + limits.ngram])
        return Drop(f"{limits.ngram} words of an evaluation set", f"{hits.size} times, first: {words}")

    return judge
