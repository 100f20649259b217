from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mega_common.errors import DataError
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.token_files.dataset_info import DatasetInfo
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.merge_datasets import merge_datasets
from mega_data.token_files.verify_dataset import verify_dataset
from mega_data.tokenizer import train_tokenizer


def preprocess_values(folder: Path, name: str, tokenizer: Path, *values: str, append_eod: bool = False) -> Path:
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    preprocess_corpus([source], tokenizer, folder / name, append_eod=append_eod)
    return folder / name


def foreign(prefix: Path, dtype: str = "uint16") -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_document(np.array([1, 2, 3]))
    return prefix


def test_merging_is_as_tokenizing_together(tmp_path: Path, tokenizer_folder: Path) -> None:
    one = preprocess_values(tmp_path, "one", tokenizer_folder, "the cat", "", "the dog")
    two = preprocess_values(tmp_path, "two", tokenizer_folder, "a mat")
    together = preprocess_values(tmp_path, "together", tokenizer_folder, "the cat", "", "the dog", "a mat")
    info = merge_datasets([one, two], tmp_path / "merged")
    assert info == verify_dataset(tmp_path / "merged")
    expected = verify_dataset(together)
    assert isinstance(expected, DatasetInfo)
    assert info == expected.model_copy(update={"made_from": None})


def test_different_tokenizers_are_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    train_tokenizer(["other"], 260, tmp_path / "other")
    one = preprocess_values(tmp_path, "one", tokenizer_folder, "the cat")
    two = preprocess_values(tmp_path, "two", tmp_path / "other", "the dog")
    with pytest.raises(DataError, match=r"two: has another tokenizer .* than .*one"):
        merge_datasets([one, two], tmp_path / "merged")
    info = merge_datasets([one, two], tmp_path / "merged", mixed=True)
    assert (info.tokenizer, info.append_eod, info.documents) == (None, False, 2)


def test_different_ends_are_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    one = preprocess_values(tmp_path, "one", tokenizer_folder, "the cat")
    two = preprocess_values(tmp_path, "two", tokenizer_folder, "the dog", append_eod=True)
    for prefixes in ([one, two], [two, one]):
        with pytest.raises(DataError, match=r"two: has an end token after each document .*, .*one does not"):
            merge_datasets(prefixes, tmp_path / "merged")
    info = merge_datasets([one, two], tmp_path / "merged", mixed=True)
    assert info.append_eod is None
    assert info.tokenizer is not None


def test_data_sets_of_other_tools(tmp_path: Path, tokenizer_folder: Path) -> None:
    one, two = foreign(tmp_path / "one"), foreign(tmp_path / "two")
    assert merge_datasets([one, two], tmp_path / "merged").tokenizer is None
    assert IndexedReader(tmp_path / "merged").tokens.tolist() == [1, 2, 3, 1, 2, 3]
    with pytest.raises(DataError, match=r"another tokenizer \(unknown\)"):
        merge_datasets([preprocess_values(tmp_path, "ours", tokenizer_folder, "the cat"), one], tmp_path / "more")


def test_dtypes_must_agree(tmp_path: Path) -> None:
    prefixes = [foreign(tmp_path / "one"), foreign(tmp_path / "two", "int32")]
    with pytest.raises(DataError, match=r"two: has int32 tokens, but .*one has uint16"):
        merge_datasets(prefixes, tmp_path / "merged", mixed=True)
    assert not list(tmp_path.glob("*merged*"))


def test_outputs_that_cannot_be(tmp_path: Path) -> None:
    one, two = foreign(tmp_path / "one"), foreign(tmp_path / "two")
    with pytest.raises(DataError, match=r"two.idx: exists already"):
        merge_datasets([one], two)
    with pytest.raises(DataError, match="is both an input and the output"):
        merge_datasets([one, two], two, overwrite=True)
    with pytest.raises(DataError, match=r"three.idx: no such file"):
        merge_datasets([one, tmp_path / "three"], tmp_path / "merged")
