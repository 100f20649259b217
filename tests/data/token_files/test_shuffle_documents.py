from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mega_common.errors import DataError
from mega_data.token_files import shuffle_documents as module
from mega_data.token_files.dataset_info import SkippedCounts, TokenizerInfo, read_dataset_info, write_dataset_info
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.shuffle_documents import shuffle_documents
from mega_data.token_files.verify_dataset import verify_dataset


def data_set(prefix: Path, lengths: list[int]) -> None:
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_documents(np.arange(sum(lengths)), lengths)
    write_dataset_info(
        prefix, tokenizer=TokenizerInfo(path="tok", fingerprint="f", vocab_size=60_000, eos_id=0), append_eod=True,
        dtype="uint16", documents=len(lengths), tokens=sum(lengths), text_bytes=77, skipped=SkippedCounts(empty=3),
        bin_sha256="0" * 64,
    )  # fmt: skip


def documents(prefix: Path) -> list[list[int]]:
    reader = IndexedReader(prefix)
    return [reader.read_sequence(i).tolist() for i in range(len(reader))]


@pytest.mark.parametrize(("bucket", "chunk"), [(1 << 28, 1 << 22), (4000, 300), (100, 7)])
def test_every_document_is_there_once_in_an_order_that_the_seed_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int, chunk: int
) -> None:
    lengths = np.random.default_rng(1).integers(0, 60, 500).tolist()
    data_set(tmp_path / "d", lengths)
    shuffle_documents(tmp_path / "d", tmp_path / "at once", seed=1)
    monkeypatch.setattr(module, "BUCKET", bucket)
    monkeypatch.setattr(module, "CHUNK", chunk)
    info = shuffle_documents(tmp_path / "d", tmp_path / "one", seed=1)
    shuffle_documents(tmp_path / "d", tmp_path / "two", seed=2)
    before, one = documents(tmp_path / "d"), documents(tmp_path / "one")
    assert one == documents(tmp_path / "at once")
    assert sorted(one) == sorted(before)
    assert one != before
    assert documents(tmp_path / "two") != one
    assert sum(b == a + 1 for a, b in pairwise(document[0] for document in one if document)) < 30
    assert (info.documents, info.tokens, info.text_bytes, info.skipped.empty) == (500, sum(lengths), 77, 3)
    assert read_dataset_info(tmp_path / "one") == info
    verify_dataset(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{name}.{suffix}" for name in ("d", "at once", "one", "two") for suffix in ("bin", "idx", "info")
    )


def test_an_output_that_exists_and_the_input_are_not_written_over(tmp_path: Path) -> None:
    data_set(tmp_path / "d", [3, 4])
    data_set(tmp_path / "there", [5])
    with pytest.raises(DataError, match="exists already"):
        shuffle_documents(tmp_path / "d", tmp_path / "there", seed=1)
    with pytest.raises(DataError, match="is both an input and the output"):
        shuffle_documents(tmp_path / "d", tmp_path / "d", seed=1, overwrite=True)
    shuffle_documents(tmp_path / "d", tmp_path / "there", seed=1, overwrite=True)
    assert len(documents(tmp_path / "there")) == 2
