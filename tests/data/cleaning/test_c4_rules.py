from __future__ import annotations

from pathlib import Path

import pytest

from mega_common.errors import DataError
from mega_data.cleaning.c4_rules import apply_c4_rule
from mega_data.cleaning.clean_config import C4Rule
from mega_data.cleaning.rule_verdict import ChangeDocument, DropDocument
from mega_data.cleaning.text_words import AnalyzedText

GOOD = "This is a line of text.\nHere comes one more of them!\nIs that enough for you?"


def judged(text: str, **changes: object) -> DropDocument | ChangeDocument | None:
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
    assert judged(f"{GOOD}\n{line}") == ChangeDocument(GOOD, {f"lines {why}": 1})


def test_citations_go_out_of_lines() -> None:
    found = judged(GOOD.replace("text.", "text.[3]").replace("more", "more[citation needed]"))
    assert isinstance(found, ChangeDocument)
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
    assert isinstance(found, DropDocument)
    assert found.why == why


def test_bad_words_are_those_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_text("Enough\nother\n")
    assert judged(GOOD, bad_words=tmp_path / "bad.txt") == DropDocument("bad word", "enough")
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
    assert judged("nothing", min_sentences=0) == DropDocument("no line left")
