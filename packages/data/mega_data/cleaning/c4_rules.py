"""C4's rules for lines and documents (Raffel et al. 2020, arXiv:1910.10683, section 2.2, and the data set's own code).

One difference: sentences are counted by their end marks, while C4 uses a trained model.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from mega_common.bounded_parsing import read_utf8_text
from mega_common.errors import DataError
from mega_data.cleaning.clean_config import C4Rule
from mega_data.cleaning.rule_verdict import ChangeDocument, DropDocument
from mega_data.cleaning.text_words import AnalyzedText

END_MARKS = (".", "!", "?", '"', "”", "。", "！", "？", "」")
ELLIPSES = ("...", "…")
CITATIONS = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
POLICIES = re.compile("terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")
SENTENCE = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s|$)|[。！？]")


def apply_c4_rule(text: AnalyzedText, limits: C4Rule) -> DropDocument | ChangeDocument | None:
    """Apply the C4 line and document filter: return the text of the remaining lines, the reason to drop the document,
    or None if nothing changes.
    """
    lower = text.text.lower()
    if limits.lorem_ipsum and "lorem ipsum" in lower:
        return DropDocument("lorem ipsum")
    if limits.curly_brackets and "{" in text.text:
        return DropDocument("curly bracket")
    if limits.bad_words is not None and (bad := load_bad_words(limits.bad_words).intersection(text.words)):
        return DropDocument("bad word", min(bad))
    lines = [_filter_line(line, limits) for line in text.text.splitlines()]
    kept = [line for line, why in lines if why is None]
    sentences = sum(max(1, len(SENTENCE.findall(line))) for line in kept)
    if sentences < limits.min_sentences:
        return DropDocument(f"sentences below {limits.min_sentences}", str(sentences))
    if not kept:
        return DropDocument("no line left")
    result = "\n".join(kept)
    dropped = Counter(f"lines {why}" for _, why in lines if why)
    return ChangeDocument(result, dict(dropped) or {"citations and spaces": 1}) if result != text.text else None


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
