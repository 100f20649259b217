"""A disk that refuses while a data set gets its names: one sentence, and no index that belongs to other tokens."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mega_common.errors import DataError
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.remote_copies import resolve_local_prefix

NUMBERS = {"EIO": errno.EIO, "EXDEV": errno.EXDEV, "EROFS": errno.EROFS, "ESTALE": errno.ESTALE, "ENOSPC": errno.ENOSPC}
CALLS = [("replace", 0), ("replace", 1), ("replace", 2), ("fsync", 0), ("fsync", 1), ("fsync", 2), ("fsync", 3)]


@contextmanager
def refused(name: str, number: int, at: int) -> Iterator[None]:
    """Let the call `at`, counted from 0, of `os.<name>` and all later ones fail as a file system does."""
    real, calls = getattr(os, name), iter(range(1 << 30))

    def failing(*arguments: Any, **options: Any) -> Any:
        if next(calls) < at:
            return real(*arguments, **options)
        raise OSError(number, os.strerror(number))

    with mock.patch.object(os, name, failing):
        yield


def assert_one_sentence(error: DataError, number: int, named: str) -> None:
    assert error.exit_status == 2
    assert len(error.message.splitlines()) == 1
    assert os.strerror(number) in error.message
    assert named in error.message


def write_lines(path: Path, word: str, count: int) -> None:
    path.write_text("".join(json.dumps({"text": f"{word} {i}"}) + "\n" for i in range(count)))


@pytest.mark.parametrize("refusal", NUMBERS)
@pytest.mark.parametrize(("name", "at"), CALLS)
def test_tokens_in_place_of_others(tmp_path: Path, tokenizer_folder: Path, name: str, at: int, refusal: str) -> None:
    """What is there afterwards is the old data, the new data or none; the same command goes on."""
    lines, prefix = tmp_path / "a.jsonl", tmp_path / "d"
    contents = []
    for word, count in (("cat", 20), ("mat", 30)):
        write_lines(lines, word, count)
        preprocess_corpus([lines], tokenizer_folder, tmp_path / word)
        contents.append(IndexedReader(tmp_path / word).tokens.tolist())
    write_lines(lines, "cat", 20)
    preprocess_corpus([lines], tokenizer_folder, prefix)
    write_lines(lines, "mat", 30)
    with refused(name, NUMBERS[refusal], at), pytest.raises(DataError) as raised:
        preprocess_corpus([lines], tokenizer_folder, prefix, overwrite=True)
    assert_one_sentence(raised.value, NUMBERS[refusal], str(tmp_path))
    if prefix.with_name("d.idx").exists():
        assert IndexedReader(prefix).tokens.tolist() in contents
    preprocess_corpus([lines], tokenizer_folder, prefix, overwrite=True)
    assert IndexedReader(prefix).tokens.tolist() == contents[1]


@pytest.mark.parametrize("refusal", NUMBERS)
@pytest.mark.parametrize(("name", "at"), [*CALLS[:2], *CALLS[3:5]])
def test_fetched_tokens(tmp_path: Path, store: Any, name: str, at: int, refusal: str) -> None:
    with IndexedWriter(tmp_path / "wiki", "uint16") as writer:
        for number in range(50):
            writer.add_document(np.arange(number + 1))
    for path in tmp_path.glob("wiki.*"):
        store.pipe(f"/bucket/{path.name}", path.read_bytes())
    url, cache = Path("memory://bucket/wiki"), tmp_path / "cache"
    with refused(name, NUMBERS[refusal], at), pytest.raises(DataError) as raised:
        resolve_local_prefix(url, cache)
    assert_one_sentence(raised.value, NUMBERS[refusal], str(cache))
    assert (
        IndexedReader(resolve_local_prefix(url, cache)).tokens.tolist()
        == IndexedReader(tmp_path / "wiki").tokens.tolist()
    )
