from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_common.errors import DataError
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.reports.inspect_dataset import FrequentToken, SequenceSample, inspect_dataset
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer, train_tokenizer


def written(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, np.int32))
    return prefix


@given(documents=st.lists(st.lists(st.integers(0, 20), max_size=40), max_size=10))
def test_counts(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]) -> None:
    found = inspect_dataset(written(tmp_path_factory.mktemp("d") / "d", documents), frequent=1000)
    tokens = [token for document in documents for token in document]
    assert (found.documents, found.sequences, found.tokens) == (len(documents), len(documents), len(tokens))
    assert {token.id: token.count for token in found.frequent} == {token: tokens.count(token) for token in tokens}
    assert [token.count for token in found.frequent] == sorted((t.count for t in found.frequent), reverse=True)
    assert found.distinct_tokens == len(set(tokens))
    for low, count in found.histogram.items():
        assert count == sum(low <= len(document) < max(2 * low, 1) for document in documents)
    assert sum(found.histogram.values()) == len(documents)


def test_lengths_and_samples(tmp_path: Path) -> None:
    found = inspect_dataset(written(tmp_path / "d", [[i] * i for i in range(1, 10)]), samples=3, head=2)
    assert found.lengths == {"min": 1, "median": 5.0, "mean": 5.0, "max": 9}
    assert found.samples == [
        SequenceSample(0, 1, [1], None),
        SequenceSample(4, 5, [5, 5], None),
        SequenceSample(8, 9, [9, 9], None),
    ]
    assert found.frequent[0] == FrequentToken(9, 9, None)
    assert inspect_dataset(tmp_path / "d", samples=0).samples == []


def test_texts_are_decoded(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat sat"}\n')
    preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, tmp_path / "d", append_eod=True)
    for tokenizer in (None, Tokenizer(tokenizer_folder)):
        [sample] = inspect_dataset(tmp_path / "d", tokenizer).samples
        assert sample.text == "the cat sat<|endoftext|>"
    with pytest.raises(DataError, match="requires the tokenizer"):
        inspect_dataset(tmp_path / "d", train_tokenizer(["other"], 260, tmp_path / "other"))


def test_a_changed_tokenizer_decodes_nothing(tmp_path: Path) -> None:
    train_tokenizer(["one"], 260, tmp_path / "tok")
    (tmp_path / "a.jsonl").write_text('{"text": "the cat sat"}\n')
    preprocess_corpus([tmp_path / "a.jsonl"], tmp_path / "tok", tmp_path / "d")
    train_tokenizer(["another"], 262, tmp_path / "tok", overwrite=True)
    assert inspect_dataset(tmp_path / "d").samples[0].text is None


def test_negative_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has the token id -1"):
        inspect_dataset(written(tmp_path / "d", [[1, -1]], "int32"))
