from __future__ import annotations

import pytest

from mega_data.cleaning.clean_config import GopherQualityRule, GopherRepetitionRule
from mega_data.cleaning.gopher_rules import (
    _measure_duplicate_ngrams,
    _measure_top_ngram,
    apply_quality_rule,
    apply_repetition_rule,
)
from mega_data.cleaning.text_words import AnalyzedText

PROSE = " ".join(f"word{i} and some that number{i} of things" for i in range(12))


def why(text: str) -> str | None:
    found = apply_quality_rule(AnalyzedText(text), GopherQualityRule())
    return found and found.why


def test_prose_stays() -> None:
    assert why(PROSE) is None
    varied = " ".join(f"w{i}" for i in range(300))
    assert apply_repetition_rule(AnalyzedText(varied), GopherRepetitionRule()) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "words below 50"),
        ("the of " * 24 + "a", "words below 50"),
        ("the of " * 50_001, "words above 100000"),
        ("a b the of " * 20, "mean word length below 3"),
        (PROSE + " " + "x" * 1000, "mean word length above 10"),
        (PROSE + " ##########", "# per word above 0.1"),
        (PROSE + " and..." * 5 + " so…" * 5, "ellipses per word above 0.1"),
        ("\n".join(f"- {line}" for line in [PROSE] * 10), "bullet lines above 0.9"),
        ("\n".join([PROSE] * 6 + [PROSE + " ..."] * 4), "ellipsis lines above 0.3"),
        (PROSE + " 12345" * 30, "words with a letter below 0.8"),
        (PROSE.replace("of", "from").replace("and", "with").replace("that", "with"), "stop words below 2"),
    ],
)
def test_each_number_of_the_paper_has_its_reason(text: str, reason: str) -> None:
    assert why(text) == reason


def test_limits_are_included() -> None:
    assert why(" ".join(["that", "with", "word"] * 16 + ["that", "with"])) is None  # 50 words
    assert why(" ".join(["that", "with", "word"] * 16 + ["that"])) == "words below 50"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("one\ntwo two two\nthree three\none\none", "duplicate lines above 0.3"),
        ("a\nb\nc\n" + "x" * 90 + "\n" + "x" * 90, "characters in duplicate lines above 0.2"),
        ("a b\n\nc d\n\na b\n\na b", "duplicate lines above 0.3"),
    ],
)
def test_repeated_lines(text: str, reason: str) -> None:
    found = apply_repetition_rule(AnalyzedText(text), GopherRepetitionRule())
    assert found is not None
    assert found.why == reason


def test_repeated_paragraphs() -> None:
    lines = GopherRepetitionRule(max_duplicate_lines=1, max_duplicate_line_chars=1)
    found = apply_repetition_rule(AnalyzedText("a b\n\nc d\n \na b\n\na b"), lines)
    assert found is not None
    assert (found.why, found.detail) == ("duplicate paragraphs above 0.3", "0.5")


def test_top_ngram_is_its_share_of_characters() -> None:
    # "aa bb" stands three times: 12 of 12 + 3 + 4 characters
    assert _measure_top_ngram(AnalyzedText("aa bb ccc aa bb dddd aa bb"), 2) == pytest.approx(12 / 19)
    assert _measure_top_ngram(AnalyzedText("all of these words are different"), 2) == 0
    assert _measure_top_ngram(AnalyzedText("one"), 2) == 0


def test_duplicate_ngrams_count_each_character_once() -> None:
    # The second "a b c d" repeats; "b c d" in it overlaps and counts no more.
    assert _measure_duplicate_ngrams(AnalyzedText("a b c d x a b c d"), 3) == pytest.approx(4 / 9)
    assert _measure_duplicate_ngrams(AnalyzedText("a a a a a"), 2) == pytest.approx(4 / 5)
    assert _measure_duplicate_ngrams(AnalyzedText("a b"), 3) == 0
