"""Gopher's rules on quality and repetition (Rae et al. 2021, arXiv:2112.11446, appendix A1.1).

A measure outside its limits drops the document. For quality, words are separated by spaces, as in the paper. For
repetition, they are `AnalyzedText.words`, and characters are those of words, so that shares refer to the whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from mega_data.cleaning.clean_config import GopherQualityRule, GopherRepetitionRule
from mega_data.cleaning.rule_verdict import BoundedMeasure, DropDocument, check_measure_bounds
from mega_data.cleaning.text_words import AnalyzedText

BULLETS = ("•", "‣", "◦", "▪", "-", "*", "–")
ELLIPSES = ("...", "…")
PARAGRAPHS = re.compile(r"\n\s*\n")


def apply_quality_rule(text: AnalyzedText, limits: GopherQualityRule) -> DropDocument | None:
    """Apply the Gopher quality filter to a document's words, symbols, lines and stop words: return the reason to drop
    it, or None to keep it.
    """
    return check_measure_bounds(_measure_quality(text, limits))


def apply_repetition_rule(text: AnalyzedText, limits: GopherRepetitionRule) -> DropDocument | None:
    """Apply the Gopher repetition filter to the shares of a document that repeat its earlier text: return the reason to
    drop it, or None to keep it.
    """
    return check_measure_bounds(_measure_repetition(text, limits))


def _measure_quality(text: AnalyzedText, limits: GopherQualityRule) -> Iterator[BoundedMeasure]:
    words = text.text.split()
    count = max(1, len(words))
    yield BoundedMeasure("words", len(words), limits.min_words, limits.max_words)
    mean = sum(map(len, words)) / count
    yield BoundedMeasure("mean word length", mean, limits.min_mean_word_length, limits.max_mean_word_length)
    yield BoundedMeasure("# per word", text.text.count("#") / count, 0, limits.max_symbols_per_word)
    ellipses = sum(map(text.text.count, ELLIPSES))
    yield BoundedMeasure("ellipses per word", ellipses / count, 0, limits.max_symbols_per_word)
    lines = [line for line in map(str.strip, text.text.splitlines()) if line]
    yield BoundedMeasure(
        "bullet lines", _fraction_true(line.startswith(BULLETS) for line in lines), 0, limits.max_bullet_lines
    )
    yield BoundedMeasure(
        "ellipsis lines", _fraction_true(line.endswith(ELLIPSES) for line in lines), 0, limits.max_ellipsis_lines
    )
    alphabetic = _fraction_true(word.isalpha() or any(map(str.isalpha, word)) for word in words)
    yield BoundedMeasure("words with a letter", alphabetic, limits.min_alphabetic_words, 1)
    stop_words = len(set(limits.stop_words).intersection(text.words))
    yield BoundedMeasure("stop words", stop_words, limits.min_stop_words, math.inf)


def _fraction_true(flags: Iterator[bool]) -> float:
    found = list(flags)
    return sum(found) / max(1, len(found))


def _measure_repetition(text: AnalyzedText, limits: GopherRepetitionRule) -> Iterator[BoundedMeasure]:
    lines, line_chars = _measure_repeats([line for line in map(str.strip, text.text.splitlines()) if line])
    yield BoundedMeasure("duplicate lines", lines, 0, limits.max_duplicate_lines)
    yield BoundedMeasure("characters in duplicate lines", line_chars, 0, limits.max_duplicate_line_chars)
    paragraphs, paragraph_chars = _measure_repeats(PARAGRAPHS.split(text.text.strip()))
    yield BoundedMeasure("duplicate paragraphs", paragraphs, 0, limits.max_duplicate_paragraphs)
    yield BoundedMeasure("characters in duplicate paragraphs", paragraph_chars, 0, limits.max_duplicate_paragraph_chars)
    for n, limit in limits.max_top_ngram_chars.items():
        yield BoundedMeasure(f"characters in the top {n}-gram", _measure_top_ngram(text, n), 0, limit)
    for n, limit in limits.max_duplicate_ngram_chars.items():
        yield BoundedMeasure(f"characters in duplicate {n}-grams", _measure_duplicate_ngrams(text, n), 0, limit)


def _measure_repeats(parts: Sequence[str]) -> tuple[float, float]:
    """Return the share of parts that occurred before, and of their characters."""
    earlier: set[str] = set()
    repeats = [part for part in parts if part in earlier or earlier.add(part)]  # type: ignore[func-returns-value]
    return len(repeats) / max(1, len(parts)), sum(map(len, repeats)) / max(1, sum(map(len, parts)))


def _measure_top_ngram(text: AnalyzedText, n: int) -> float:
    """Return the share of characters in the most frequent run of n words, 0 if none occurs twice."""
    _, first, counts = np.unique(text.hash_word_ngrams(n), return_index=True, return_counts=True)
    if not counts.size or counts.max() == 1:
        return 0.0
    longest = max(int(text.word_lengths[i : i + n].sum()) for i in first[counts == counts.max()])
    return int(counts.max()) * longest / int(text.word_lengths.sum())


def _measure_duplicate_ngrams(text: AnalyzedText, n: int) -> float:
    """Return the share of characters in runs of n words that occurred before, each character counted once."""
    hashes = text.hash_word_ngrams(n)
    if not hashes.size:
        return 0.0
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    repeats = first[inverse] != np.arange(hashes.size)
    starts = np.concatenate([repeats, np.zeros(n - 1, bool)]).astype(np.int64)
    ends = np.concatenate([np.zeros(n, np.int64), repeats])[: starts.size]
    return int(text.word_lengths[np.cumsum(starts - ends) > 0].sum()) / int(text.word_lengths.sum())
