from __future__ import annotations

import json
import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_common.errors import DataError
from mega_data.cleaning.clean_config import CleanConfig
from mega_data.cleaning.clean_run import clean_corpus
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.reports import html_report
from mega_data.reports.html_report import (
    count_duplicate_sequences,
    count_languages,
    count_near_duplicates,
    find_frequent_ngrams,
    sample_sequences,
    write_dataset_html_report,
)
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer, train_tokenizer


def written(prefix: Path, *sequences: list[int]) -> IndexedReader:
    with IndexedWriter(prefix, np.uint16) as writer:
        for sequence in sequences:
            writer.add_document(np.array(sequence, np.uint16))
    return IndexedReader(prefix)


def test_a_small_data_set_is_looked_at_whole_and_of_a_large_one_a_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = written(tmp_path / "d", *([i] * 10 for i in range(100)))
    assert len(sample_sequences(reader)) == 100
    monkeypatch.setattr(html_report, "SAMPLE", 50)
    assert [tokens[0] for tokens in sample_sequences(reader)] == [0, 24, 49, 74, 99]
    assert sample_sequences(written(tmp_path / "e")) == []


def test_duplicates_are_counted_with_their_tokens(tmp_path: Path) -> None:
    pytest.importorskip("rensa", reason="makes the signatures")
    one, other = list(range(100)), list(range(200, 300))
    near = [*one[:50], 999, *one[51:]]
    reader = written(tmp_path / "d", one, other, one, near)
    assert count_duplicate_sequences(reader, sample_sequences(reader)) == html_report.DuplicateCounts(
        of=4, exact=1, exact_tokens=100, sampled=4, near=2
    )


def test_without_rensa_near_duplicates_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    assert count_near_duplicates([np.array([1, 2])]) is None


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=4))
def test_the_most_frequent_run_is_within_sequences(sequences: list[list[int]]) -> None:
    counts = Counter(tuple(s[i : i + 2]) for s in sequences for i in range(len(s) - 1))
    found = find_frequent_ngrams([np.array(s, np.int64) for s in sequences], 2, 1)
    if max(counts.values(), default=0) < 2:
        assert found == []
    else:
        assert counts[tuple(found[0][0])] == found[0][1] == max(counts.values())


def test_a_phrase_is_shown_once() -> None:
    phrase = list(range(10))
    found = find_frequent_ngrams([np.array([*phrase, 50 + i, *phrase]) for i in range(5)], 4, 12)
    assert [ids for ids, _ in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_languages() -> None:
    pytest.importorskip("lingua", reason="tells languages")
    german = "Der Hund lief über die Straße und bellte, bis er müde war."
    assert count_languages(["The dog ran over the street and barked until it was tired.", german, german, "123"]) == {
        "de": 2, "en": 1, "und": 1,
    }  # fmt: skip


def test_without_lingua_languages_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lingua", None)
    assert count_languages(["text"]) is None


HARM = "<script>alert(1)</script>"


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects what the page asks for and says."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.asked: list[str] = []
        self.text = ""
        self.feed(path.read_text())
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.asked += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def corpus(tmp_path: Path, tokenizer_folder: Path) -> Path:
    values = [*(f"the cat sat on mat {i}" for i in range(10)), HARM, "the cat sat on mat 1", "x"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, tmp_path / "d", append_eod=True)
    config = CleanConfig.parse({"length": {"min_chars": 2}, "duplicates": True})
    clean_corpus([tmp_path / "a.jsonl"], config, tmp_path / "clean", workers=1)
    return tmp_path


def test_the_page_is_whole_asks_for_nothing_and_escapes_texts(corpus: Path) -> None:
    write_dataset_html_report([corpus / "d", corpus / "clean"], corpus / "r.html", samples=13)
    page = Page(corpus / "r.html")
    assert all(asked.startswith("#") for asked in page.asked)
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"url\(|@import", (corpus / "r.html").read_text())
    assert HARM in page.text


def test_the_json_beside_it_has_what_the_page_shows(corpus: Path) -> None:
    found = write_dataset_html_report([corpus / "d", corpus / "clean"], corpus / "r.html")
    assert json.loads((corpus / "r.json").read_text()) == json.loads(json.dumps(found))
    (described,), (cleaned,) = found["sets"], found["cleaned"]
    assert described["inspection"]["documents"] == 13
    assert described["duplicates"]["exact"] == 1
    assert described["text_bytes"] == described["inspection"]["info"]["text_bytes"]
    assert described["ngrams"][3][0]["count"] >= 11
    assert cleaned["rules"]["length"]["dropped"]["documents"] == cleaned["rules"]["exact"]["dropped"]["documents"] == 1
    text = Page(corpus / "r.html").text
    for shown in (f"{described['inspection']['tokens']}", "characters below 2: 1", "of the text is kept"):
        assert shown in text


def test_a_data_set_without_description_and_an_empty_one(tmp_path: Path) -> None:
    for name, sequences in (("foreign", [[1, 2, 3], [1, 2, 3]]), ("empty", [])):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for sequence in sequences:
                writer.add_document(np.array(sequence, np.uint16))
    found = write_dataset_html_report([tmp_path / "foreign", tmp_path / "empty"], tmp_path / "r.html")
    assert [described["languages"] for described in found["sets"]] == [None, None]
    assert "All data sets" in Page(tmp_path / "r.html").text


def test_what_is_refused(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(DataError, match=r"has no summary.json(?s:.*)prefix of a data set"):
        write_dataset_html_report([other], corpus / "r.html")
    with pytest.raises(DataError, match="no such file"):
        write_dataset_html_report([other / "d"], corpus / "r.html")
    train_tokenizer(["other text"], 260, other / "tok")
    with pytest.raises(DataError, match="requires the tokenizer"):
        write_dataset_html_report([corpus / "d"], corpus / "r.html", tokenizer=Tokenizer(other / "tok"))
    assert not (corpus / "r.html").exists()
