from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_data.reports import dataset_statistics
from mega_data.reports.dataset_statistics import (
    count_duplicates,
    count_languages,
    count_near_duplicates,
    find_frequent_ngrams,
    sample_sequences,
)
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.indexed_writer import IndexedWriter


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
    monkeypatch.setattr(dataset_statistics, "SAMPLE", 50)
    assert [tokens[0] for tokens in sample_sequences(reader)] == [0, 24, 49, 74, 99]
    assert sample_sequences(written(tmp_path / "e")) == []


def test_duplicates_are_counted_with_their_tokens(tmp_path: Path) -> None:
    pytest.importorskip("rensa", reason="makes the signatures")
    one, other = list(range(100)), list(range(200, 300))
    near = [*one[:50], 999, *one[51:]]
    reader = written(tmp_path / "d", one, other, one, near)
    assert count_duplicates(reader, sample_sequences(reader)) == dataset_statistics.DuplicateCounts(
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
