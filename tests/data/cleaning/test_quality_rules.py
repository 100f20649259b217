from __future__ import annotations

from pathlib import Path

import pytest

from mega_common.errors import DataError
from mega_data.cleaning.clean_config import C4Rule, GopherQualityRule, GopherRepetitionRule, PiiRule
from mega_data.cleaning.quality_rules import (
    ChangeDocumentVerdict,
    DropDocumentVerdict,
    _measure_duplicate_ngrams,
    _measure_top_ngram,
    apply_c4_rule,
    apply_gopher_quality_rule,
    apply_gopher_repetition_rule,
    apply_pii_rule,
)
from mega_data.cleaning.text_words import AnalyzedText

GOOD = "This is a line of text.\nHere comes one more of them!\nIs that enough for you?"


def judged(text: str, **changes: object) -> DropDocumentVerdict | ChangeDocumentVerdict | None:
    return apply_c4_rule(AnalyzedText(text), C4Rule.parse(changes))


def test_good_lines_stay() -> None:
    assert judged(GOOD) is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("No mark at the end of this", "without an end mark"),
        ("It goes on and on and on...", "without an end mark"),
        ("Too few words.", "of fewer than 5 words"),
        ("There is a " + "x" * 1001 + " in this line.", "with a long word"),
        ("Please enable JavaScript to see this page.", "with Javascript"),
        ("By this you accept our terms of use.", "on policies"),
    ],
)
def test_lines_go(line: str, why: str) -> None:
    assert judged(f"{GOOD}\n{line}") == ChangeDocumentVerdict(GOOD, {f"lines {why}": 1})


def test_citations_go_out_of_lines() -> None:
    found = judged(GOOD.replace("text.", "text.[3]").replace("more", "more[citation needed]"))
    assert isinstance(found, ChangeDocumentVerdict)
    assert found.text == GOOD


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (GOOD + "\nLorem ipsum dolor sit amet here.", "lorem ipsum"),
        (GOOD + "\nint main() { return }.", "curly bracket"),
        ("This is a line of text.\nHere comes one more of them!", "sentences below 3"),
        ("nothing", "sentences below 3"),
    ],
)
def test_documents_go(text: str, why: str) -> None:
    found = judged(text)
    assert isinstance(found, DropDocumentVerdict)
    assert found.why == why


def test_bad_words_are_those_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("Enough\nother\n")
    assert judged(GOOD, bad_words=tmp_path / "bad.txt") == DropDocumentVerdict("bad word", "enough")
    with pytest.raises(DataError, match=r"none.txt: cannot be read"):
        judged(GOOD, bad_words=tmp_path / "none.txt")


def test_each_rule_can_be_off() -> None:
    off = {
        "end_marks": False,
        "min_words_per_line": 0,
        "javascript": False,
        "curly_brackets": False,
        "min_sentences": 0,
    }
    assert judged("int main() { javascript }", **off) is None


def test_a_document_without_a_line_goes() -> None:
    assert judged("nothing", min_sentences=0) == DropDocumentVerdict("no line left")


PROSE = " ".join(f"word{i} and some that number{i} of things" for i in range(12))


def why(text: str) -> str | None:
    found = apply_gopher_quality_rule(AnalyzedText(text), GopherQualityRule())
    return found and found.why


def test_prose_stays() -> None:
    assert why(PROSE) is None
    varied = " ".join(f"w{i}" for i in range(300))
    assert apply_gopher_repetition_rule(AnalyzedText(varied), GopherRepetitionRule()) is None


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
    found = apply_gopher_repetition_rule(AnalyzedText(text), GopherRepetitionRule())
    assert found is not None
    assert found.why == reason


def test_repeated_paragraphs() -> None:
    lines = GopherRepetitionRule(max_duplicate_lines=1, max_duplicate_line_chars=1)
    found = apply_gopher_repetition_rule(AnalyzedText("a b\n\nc d\n \na b\n\na b"), lines)
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


ALL = PiiRule(kinds=["email", "ip", "phone", "card", "iban"])


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("write to Jo.Doe+x@mail.example.com.", "write to <EMAIL>."),
        ("from 8.8.8.8:53 and 2001:4860:4860::8888", "from <IP>:53 and <IP>"),
        ("call +49 (30) 1234-5678 or", "call <PHONE> or"),
        ("card 4111 1111 1111 1111!", "card <CARD>!"),
        ("pay DE89 3704 0044 0532 0130 00 now", "pay <IBAN> now"),
    ],
)
def test_what_is_found(text: str, masked: str) -> None:
    found = apply_pii_rule(AnalyzedText(text), ALL)
    assert (found.text if isinstance(found, ChangeDocumentVerdict) else text) == masked


@pytest.mark.parametrize(
    "text",
    ["192.168.0.1 and 127.0.0.1", "version 1.2.3.4.5", "999.1.1.1", "card 4111 1111 1111 1112", "user@localhost",
     "1 + 1234567 = 1234568", "DE00 3704 0044 0532 0130 00", "at 12:30:45", "std::vector<int>::size", "0000000000000000"],
)  # fmt: skip
def test_what_looks_alike_stays(text: str) -> None:
    assert apply_pii_rule(AnalyzedText(text), ALL) is None


def test_a_document_can_be_dropped_instead() -> None:
    found = apply_pii_rule(AnalyzedText("a@example.com b@example.com 8.8.4.4"), PiiRule(action="drop"))
    assert found == DropDocumentVerdict("email and ip", "2 email, 1 ip")


def test_patterns_of_ones_own() -> None:
    found = apply_pii_rule(AnalyzedText("number 123-45-6789"), PiiRule(patterns={"ssn": r"\b\d{3}-\d\d-\d{4}\b"}))
    assert found == ChangeDocumentVerdict("number <SSN>", {"ssn": 1})


def test_time_is_linear_in_the_text() -> None:
    text = AnalyzedText("a" * 200_000 + "." * 50_000 + "1" * 50_000 + " +1" * 50_000 + "@")
    assert apply_pii_rule(text, ALL) is None
