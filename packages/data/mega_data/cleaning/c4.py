"""C4's rules for lines and documents (Raffel et al. 2020, arXiv:1910.10683, section 2.2, and the data set's own code).

Differs in one thing: sentences are counted by their end marks, where C4 asked a trained model for them.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from mega_common.errors import DataError
from mega_data.cleaning.config import C4
from mega_data.cleaning.verdict import Change, Drop
from mega_data.cleaning.words import Text

END_MARKS = (".", "!", "?", '"', "”", "。", "！", "？", "」")
ELLIPSES = ("...", "…")
CITATIONS = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
POLICIES = re.compile("terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")
SENTENCE = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s|$)|[。！？]")


def c4(text: Text, limits: C4) -> Drop | Change | None:
    """What stays of a document's lines, or why it goes as a whole."""
    lower = text.text.lower()
    if limits.lorem_ipsum and "lorem ipsum" in lower:
        return Drop("lorem ipsum")
    if limits.curly_brackets and "{" in text.text:
        return Drop("curly bracket")
    if limits.bad_words is not None and (bad := bad_words(limits.bad_words).intersection(text.words)):
        return Drop("bad word", min(bad))
    lines = [_line(line, limits) for line in text.text.splitlines()]
    kept = [line for line, why in lines if why is None]
    sentences = sum(max(1, len(SENTENCE.findall(line))) for line in kept)
    if sentences < limits.min_sentences:
        return Drop(f"sentences below {limits.min_sentences}", str(sentences))
    if not kept:
        return Drop("no line left")
    result = "\n".join(kept)
    dropped = Counter(f"lines {why}" for _, why in lines if why)
    return Change(result, dict(dropped) or {"citations and spaces": 1}) if result != text.text else None


def _line(line: str, limits: C4) -> tuple[str, str | None]:
    """The line as it stays, and why it goes if it does."""
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
def bad_words(path: Path) -> frozenset[str]:
    """The words of a file with one a line, in lower case.

    Raises:
        DataError: when it cannot be read.
    """
    try:
        return frozenset(path.read_text(encoding="utf-8").lower().split())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
