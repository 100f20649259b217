"""Rules of corpus cleaning, and their verdicts on a document: keep (None), drop or change.

C4: rules for lines and documents (Raffel et al. 2020, arXiv:1910.10683, section 2.2, and the data set's own code). One
difference: sentences are counted by their end marks, while C4 uses a trained model.

Gopher: quality and repetition (Rae et al. 2021, arXiv:2112.11446, appendix A1.1). A measure outside its limits drops the
document. For quality, words are separated by spaces, as in the paper. For repetition, they are `AnalyzedText.words`, and
characters are those of words, so that shares refer to the whole.

Personal data by patterns: e-mail and public IP addresses, international phone numbers, card numbers, IBANs. Names and
postal addresses are not detected. Similar text that fails a check (a version number, a private address, digits with a
wrong check sum) stays.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mega_common.bounded_parsing import read_utf8_text
from mega_common.errors import DataError
from mega_data.cleaning.clean_config import C4Rule, GopherQualityRule, GopherRepetitionRule, PiiRule
from mega_data.cleaning.text_words import AnalyzedText

TextRecord = dict[str, Any]


class DropDocumentVerdict(NamedTuple):
    """Verdict of a cleaning rule to drop the document.
    `why` is one of the rule's few reasons, `detail` the finding in this document.
    """

    why: str
    detail: str = ""


class ChangeDocumentVerdict(NamedTuple):
    """Verdict of a cleaning rule to keep the document with another text; `counts` are the numbers of changes by kind."""

    text: str
    counts: dict[str, int]


CleaningRule = Callable[[AnalyzedText, TextRecord], DropDocumentVerdict | ChangeDocumentVerdict | None]


class BoundedMeasure(NamedTuple):
    """Measured value of a document and its lower and upper limits, both inclusive."""

    name: str
    value: float
    low: float
    high: float


def check_measure_bounds(measures: Iterable[BoundedMeasure]) -> DropDocumentVerdict | None:
    """Return a verdict to drop the document for the first measure outside its limits, or None.
    Later measures are not evaluated.
    """
    for name, value, low, high in measures:
        if value < low:
            return DropDocumentVerdict(f"{name} below {low:g}", f"{value:.4g}")
        if value > high:
            return DropDocumentVerdict(f"{name} above {high:g}", f"{value:.4g}")
    return None


END_MARKS = (".", "!", "?", '"', "”", "。", "！", "？", "」")
ELLIPSES = ("...", "…")
CITATIONS = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
POLICIES = re.compile("terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")
SENTENCE = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s|$)|[。！？]")


def apply_c4_rule(text: AnalyzedText, limits: C4Rule) -> DropDocumentVerdict | ChangeDocumentVerdict | None:
    """Return the verdict of C4's filter on a document: drop it, keep it with lines or citations removed, or None."""
    lower = text.text.lower()
    if limits.lorem_ipsum and "lorem ipsum" in lower:
        return DropDocumentVerdict("lorem ipsum")
    if limits.curly_brackets and "{" in text.text:
        return DropDocumentVerdict("curly bracket")
    if limits.bad_words is not None and (bad := load_bad_words(limits.bad_words).intersection(text.words)):
        return DropDocumentVerdict("bad word", min(bad))
    lines = [_filter_line(line, limits) for line in text.text.splitlines()]
    kept = [line for line, why in lines if why is None]
    sentences = sum(max(1, len(SENTENCE.findall(line))) for line in kept)
    if sentences < limits.min_sentences:
        return DropDocumentVerdict(f"sentences below {limits.min_sentences}", str(sentences))
    if not kept:
        return DropDocumentVerdict("no line left")
    result = "\n".join(kept)
    dropped = Counter(f"lines {why}" for _, why in lines if why)
    return ChangeDocumentVerdict(result, dict(dropped) or {"citations and spaces": 1}) if result != text.text else None


def _filter_line(line: str, limits: C4Rule) -> tuple[str, str | None]:
    """Return the cleaned line, and the reason to drop it or None."""
    line = (CITATIONS.sub("", line) if limits.citations else line).strip()
    words, lower = line.split(), line.lower()
    if limits.end_marks and (not line.endswith(END_MARKS) or line.endswith(ELLIPSES)):
        return line, "without an end mark"
    if len(words) < limits.min_words_per_line:
        return line, f"of fewer than {limits.min_words_per_line} words"
    if max(map(len, words), default=0) > limits.max_word_length:
        return line, "with a long word"
    if limits.javascript and "javascript" in lower:
        return line, "with Javascript"
    if limits.policies and POLICIES.search(lower):
        return line, "on policies"
    return line, None


@cache
def load_bad_words(path: Path) -> frozenset[str]:
    """Return the bad words listed one per line in a UTF-8 file, in lower case.

    Raises:
        DataError: if it cannot be read.
    """
    return frozenset(read_utf8_text(path, DataError).lower().split())


BULLETS = ("•", "‣", "◦", "▪", "-", "*", "–")
PARAGRAPHS = re.compile(r"\n\s*\n")


def apply_gopher_quality_rule(text: AnalyzedText, limits: GopherQualityRule) -> DropDocumentVerdict | None:
    """Return Gopher's quality verdict on a document: drop it for the first measure outside its limits, or None."""
    return check_measure_bounds(_measure_quality(text, limits))


def apply_gopher_repetition_rule(text: AnalyzedText, limits: GopherRepetitionRule) -> DropDocumentVerdict | None:
    """Return Gopher's repetition verdict on a document: drop it for the first share above its limit, or None."""
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


def _is_card_number(number: str) -> bool:
    digits = [int(c) for c in number if c.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return 13 <= len(digits) <= 19 and any(digits) and (sum(digits[::-2]) + sum(doubled)) % 10 == 0


def _is_public_address(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def _is_iban(number: str) -> bool:
    """Check ISO 13616: the rearranged number, letters as 10 to 35, modulo 97 is 1."""
    plain = number.replace(" ", "")
    return int("".join(str(int(c, 36)) for c in plain[4:] + plain[:4])) % 97 == 1


def _is_phone_number(number: str) -> bool:
    return 8 <= sum(map(str.isdigit, number)) <= 15  # E.164


REQUIRED_CHARACTERS = {"email": "@", "phone": "+"}  # a text without the character is not searched

KINDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "email": (r"\b[A-Za-z0-9](?:[A-Za-z0-9._%+-]{0,62}[A-Za-z0-9_%+-])?@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}\b", bool),
    "ip": (r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)|(?<![\w:])(?:[0-9A-Fa-f]{1,4}:){2,7}(?::?[0-9A-Fa-f]{1,4}){1,6}(?![\w:])", _is_public_address),
    "phone": (r"(?<![\w+])\+[1-9](?:[ ().\u2011-]{0,2}\d){6,14}(?!\d)", _is_phone_number),
    "card": (r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])", _is_card_number),
    "iban": (r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b", _is_iban),
}  # fmt: skip


def apply_pii_rule(text: AnalyzedText, limits: PiiRule) -> DropDocumentVerdict | ChangeDocumentVerdict | None:
    """Return the verdict on personal data in a document: None without any, else drop it or keep its masked text.

    Returns a `ChangeDocumentVerdict` with each item replaced by its kind (`<EMAIL>`), a `DropDocumentVerdict` with the
    reason, or None without personal data.
    """
    found: Counter[str] = Counter()
    result = text.text
    for kind, (pattern, is_valid) in _select_patterns(limits):
        if REQUIRED_CHARACTERS.get(kind, "") not in text.text:
            continue

        def mask(match: re.Match[str], kind: str = kind, is_valid: Callable[[str], bool] = is_valid) -> str:
            if not is_valid(match[0]):
                return match[0]
            found[kind] += 1
            return f"<{kind.upper()}>"

        result = pattern.sub(mask, result)
    if not found:
        return None
    if limits.action == "drop":
        return DropDocumentVerdict(" and ".join(found), ", ".join(f"{count} {kind}" for kind, count in found.items()))
    return ChangeDocumentVerdict(result, dict(found))


def _select_patterns(limits: PiiRule) -> list[tuple[str, tuple[re.Pattern[str], Callable[[str], bool]]]]:
    chosen = {kind: KINDS[kind] for kind in limits.kinds} | {
        name: (pattern, bool) for name, pattern in limits.patterns.items()
    }
    return [(kind, (_compile_pattern(pattern), is_valid)) for kind, (pattern, is_valid) in chosen.items()]


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
