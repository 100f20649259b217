from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mega_common.errors import ConfigError, DataError
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.token_files.dataset_info import get_info_path
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.verify_dataset import verify_dataset
from mega_data.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture
def prefix(tmp_path: Path, tokenizer_folder: Path) -> Path:
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n{"text": "the dog"}\n' * 50)
    preprocess_corpus([tmp_path / "a.jsonl"], tokenizer_folder, tmp_path / "d", append_eod=True)
    return tmp_path / "d"


def change(path: Path, at: int, value: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] = value
    path.write_bytes(raw)


def test_a_whole_one(prefix: Path, tokenizer_folder: Path) -> None:
    info = verify_dataset(prefix, Tokenizer(tokenizer_folder))
    assert info is not None
    assert info.documents == 100


def test_every_changed_byte_is_found(prefix: Path) -> None:
    for suffix in (".bin", ".idx"):
        path = prefix.with_name(prefix.name + suffix)
        whole = path.read_bytes()
        for at in range(0, len(whole), 97):
            change(path, at, whole[at] ^ 1)
            with pytest.raises(DataError, match=f"d{suffix}|token"):
                verify_dataset(prefix)
        path.write_bytes(whole)


def test_a_cut_file_is_named(prefix: Path) -> None:
    path = prefix.with_name("d.bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"d.bin: has .* bytes, but d.idx requires"):
        verify_dataset(prefix)


def test_tokens_outside_the_vocabulary(prefix: Path) -> None:
    change(prefix.with_name("d.bin"), 5, 3)  # the upper byte of token 2
    with pytest.raises(DataError, match=r"d.bin: token 2 has id \d+, outside the vocabulary of 300 ids"):
        verify_dataset(prefix)


def test_negative_tokens_of_another_tool(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "int32") as writer:
        writer.add_document(np.array([1, -2, 3]))
    with pytest.raises(DataError, match=r"token 1 has id -2, outside the vocabulary"):
        verify_dataset(tmp_path / "d")


def test_without_a_description(tmp_path: Path, tokenizer_folder: Path) -> None:
    for largest in (299, 300):
        with IndexedWriter(tmp_path / "d", "uint16") as writer:
            writer.add_document(np.array([1, largest]))
        assert verify_dataset(tmp_path / "d") is None
    with pytest.raises(DataError, match=r"token 1 has id 300, outside the vocabulary of 300"):
        verify_dataset(tmp_path / "d", Tokenizer(tokenizer_folder))


def test_another_tokenizer_is_named(prefix: Path, tmp_path: Path) -> None:
    other = train_tokenizer(["other"], 260, tmp_path / "other")
    with pytest.raises(DataError, match=r"d: requires the tokenizer .*, not .*other/tokenizer.json"):
        verify_dataset(prefix, other)


def test_a_description_of_something_else(prefix: Path) -> None:
    path = get_info_path(prefix)
    good = json.loads(path.read_text())
    for change_in, error, message in (
        ({"documents": 7}, DataError, "documents 100, but .*d.info says 7"),
        ({"documents": "many"}, ConfigError, "d.info: 1 problem"),
        ({"colour": "red"}, ConfigError, "unknown key"),
    ):
        path.write_text(json.dumps({**good, **change_in}))
        with pytest.raises(error, match=message):
            verify_dataset(prefix)
    for text in ("[]", "{", "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match=r"d.info: "):
            verify_dataset(prefix)
