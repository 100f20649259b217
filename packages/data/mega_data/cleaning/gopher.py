"""Gopher's rules on quality and repetition (Rae et al. 2021, arXiv:2112.11446, appendix A1.1).

A measure outside its limits drops the document. Words are those between spaces for quality, as the paper counts them; for
repetition they are `Text.words`, and characters those of words, so that a share is one of the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from mega_data.cleaning.config import GopherQuality, GopherRepetition
from mega_data.cleaning.verdict import Drop, Measure, first_outside
from mega_data.cleaning.words import Text

BULLETS = ("•", "‣", "◦", "▪", "-", "*", "–")
ELLIPSES = ("...", "…")
PARAGRAPHS = re.compile(r"\n\s*\n")


def quality(text: Text, limits: GopherQuality) -> Drop | None:
    """Whether a document reads as one: its words, symbols, lines and stop words."""
    return first_outside(_qualities(text, limits))


def repetition(text: Text, limits: GopherRepetition) -> Drop | None:
    """Whether too much of a document repeats what stood in it before."""
    return first_outside(_repetitions(text, limits))


def _qualities(text: Text, limits: GopherQuality) -> Iterator[Measure]:
    words = text.text.split()
    count = max(1, len(words))
    yield Measure("words", len(words), limits.min_words, limits.max_words)
    mean = sum(map(len, words)) / count
    yield Measure("mean word length", mean, limits.min_mean_word_length, limits.max_mean_word_length)
    yield Measure("# per word", text.text.count("#") / count, 0, limits.max_symbols_per_word)
    ellipses = sum(map(text.text.count, ELLIPSES))
    yield Measure("ellipses per word", ellipses / count, 0, limits.max_symbols_per_word)
    lines = [line for line in map(str.strip, text.text.splitlines()) if line]
    yield Measure("bullet lines", _share(line.startswith(BULLETS) for line in lines), 0, limits.max_bullet_lines)
    yield Measure("ellipsis lines", _share(line.endswith(ELLIPSES) for line in lines), 0, limits.max_ellipsis_lines)
    alphabetic = _share(word.isalpha() or any(map(str.isalpha, word)) for word in words)
    yield Measure("words with a letter", alphabetic, limits.min_alphabetic_words, 1)
    stop_words = len(set(limits.stop_words).intersection(text.words))
    yield Measure("stop words", stop_words, limits.min_stop_words, math.inf)


def _share(flags: Iterator[bool]) -> float:
    found = list(flags)
    return sum(found) / max(1, len(found))


def _repetitions(text: Text, limits: GopherRepetition) -> Iterator[Measure]:
    lines, line_chars = _repeated([line for line in map(str.strip, text.text.splitlines()) if line])
    yield Measure("duplicate lines", lines, 0, limits.max_duplicate_lines)
    yield Measure("characters in duplicate lines", line_chars, 0, limits.max_duplicate_line_chars)
    paragraphs, paragraph_chars = _repeated(PARAGRAPHS.split(text.text.strip()))
    yield Measure("duplicate paragraphs", paragraphs, 0, limits.max_duplicate_paragraphs)
    yield Measure("characters in duplicate paragraphs", paragraph_chars, 0, limits.max_duplicate_paragraph_chars)
    for n, limit in limits.max_top_ngram_chars.items():
        yield Measure(f"characters in the top {n}-gram", _top_ngram(text, n), 0, limit)
    for n, limit in limits.max_duplicate_ngram_chars.items():
        yield Measure(f"characters in duplicate {n}-grams", _duplicate_ngrams(text, n), 0, limit)


def _repeated(parts: Sequence[str]) -> tuple[float, float]:
    """The share of parts that stood before, and of their characters."""
    seen: set[str] = set()
    again = [part for part in parts if part in seen or seen.add(part)]  # type: ignore[func-returns-value]
    return len(again) / max(1, len(parts)), sum(map(len, again)) / max(1, sum(map(len, parts)))


def _top_ngram(text: Text, n: int) -> float:
    """The share of characters in the most frequent run of n words, 0 where none stands twice."""
    _, first, counts = np.unique(text.ngrams(n), return_index=True, return_counts=True)
    if not counts.size or counts.max() == 1:
        return 0.0
    longest = max(int(text.lengths[i : i + n].sum()) for i in first[counts == counts.max()])
    return int(counts.max()) * longest / int(text.lengths.sum())


def _duplicate_ngrams(text: Text, n: int) -> float:
    """The share of characters in runs of n words that stood before, each character counted once."""
    hashes = text.ngrams(n)
    if not hashes.size:
        return 0.0
    _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
    again = first[which] != np.arange(hashes.size)
    starts = np.concatenate([again, np.zeros(n - 1, bool)]).astype(np.int64)
    ends = np.concatenate([np.zeros(n, np.int64), again])[: starts.size]
    return int(text.lengths[np.cumsum(starts - ends) > 0].sum()) / int(text.lengths.sum())
