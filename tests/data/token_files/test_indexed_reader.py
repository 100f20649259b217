from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_common.errors import DataError
from mega_data.token_files.indexed_reader import HEADER, IndexedReader, get_bin_path, get_idx_path, select_token_dtype
from mega_data.token_files.indexed_writer import IndexedWriter


def reference_documents(count: int = 200) -> list[np.ndarray]:
    documents, total = [], 0
    for i in range(count):
        length = (i * 37) % 91 + 5
        documents.append((total + np.arange(length)) % 60_000)
        total += length
    return documents


def write(prefix: Path, documents: list[np.ndarray], dtype: str = "uint16") -> IndexedReader:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedReader(prefix)


def test_files_have_the_bytes_megatron_writes(tmp_path: Path) -> None:
    write(tmp_path / "d", reference_documents())
    assert hashlib.md5((tmp_path / "d.bin").read_bytes()).hexdigest() == "bd91493e189f3f5f0e494bc99dec2ff9"
    assert hashlib.md5((tmp_path / "d.idx").read_bytes()).hexdigest() == "d01ed5d42d337ef503743ed8463d5af0"


@given(
    st.lists(st.lists(st.integers(0, 2**15 - 1), max_size=20), max_size=20),
    st.sampled_from(["uint16", "int32", "int64", "int16"]),
)
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, lists: list[list[int]], dtype: str) -> None:
    prefix = tmp_path_factory.mktemp("d") / "a.b"
    documents = [np.array(one, np.int64) for one in lists]
    reader = write(prefix, documents, dtype)
    assert reader.dtype == np.dtype(dtype)
    assert len(reader) == len(documents)
    assert reader.num_tokens == sum(map(len, documents))
    assert reader.document_index.tolist() == list(range(len(documents) + 1))
    for i, document in enumerate(documents):
        assert reader.read_sequence(i).tolist() == document.tolist()
        if len(document) >= 3:
            assert reader.read_sequence(i, 1, 2).tolist() == document[1:3].tolist()
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_documents(np.concatenate([*documents, np.empty(0, np.int64)]), [len(d) for d in documents])
    assert IndexedReader(prefix).fingerprint == reader.fingerprint


def test_best_dtype() -> None:
    assert select_token_dtype(65_499) == np.uint16
    assert select_token_dtype(65_500) == np.int32


def test_append_merges_and_keeps_documents(tmp_path: Path) -> None:
    first, second = (
        write(tmp_path / "a", reference_documents(3)),
        several_sequences(tmp_path / "b", [[4, 5], [6]], [0, 2]),
    )
    with IndexedWriter(tmp_path / "ab", "uint16") as writer:
        writer.append_dataset(first)
        writer.append_dataset(second)
    merged = IndexedReader(tmp_path / "ab")
    assert merged.document_index.tolist() == [0, 1, 2, 3, 5]
    assert merged.tokens.tolist() == [*first.tokens.tolist(), 4, 5, 6]
    with (
        pytest.raises(DataError, match="cannot be appended"),
        IndexedWriter(tmp_path / "c", "int32") as writer,
    ):
        writer.append_dataset(first)


def several_sequences(prefix: Path, sequences: list[list[int]], bounds: list[int]) -> IndexedReader:
    """Written by hand: documents of several sequences, which our writer makes only when appending."""
    lengths = np.array([len(s) for s in sequences], np.int32)
    tokens = np.concatenate(sequences).astype(np.uint16)
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) * 2
    get_bin_path(prefix).write_bytes(tokens.tobytes())
    get_idx_path(prefix).write_bytes(
        HEADER.pack(b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(bounds))
        + lengths.tobytes()
        + pointers.tobytes()
        + np.array(bounds, np.int64).tobytes()
    )
    return IndexedReader(prefix)


def test_tokens_that_do_not_fit_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token 70000 does not fit"), IndexedWriter(tmp_path / "d", "uint16") as writer:
        writer.add_document(np.array([1, 70_000]))
    with pytest.raises(DataError, match="token -1 does not fit"), IndexedWriter(tmp_path / "d", "uint16") as writer:
        writer.add_document(np.array([1, -1]))
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_leaves_no_final_name_and_the_old_data_set(tmp_path: Path) -> None:
    writer = IndexedWriter(tmp_path / "d", "uint16")
    writer.add_document(np.arange(5))
    assert not [p for p in tmp_path.iterdir() if not p.name.startswith(".")]
    writer.close()
    again = IndexedWriter(tmp_path / "d", "uint16")
    again.add_document(np.arange(7))
    assert IndexedReader(tmp_path / "d").num_tokens == 5
    again.close()
    assert IndexedReader(tmp_path / "d").num_tokens == 7


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("fail_at", range(4))
def test_a_disk_that_fails_in_close_leaves_the_old_data_set_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int, old: bool
) -> None:
    """The first four syncs are of .bin, .idx, folder, folder. Old and new have files of the same sizes."""
    if old:
        write(tmp_path / "d", [np.arange(2), np.arange(4)])
    real, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at + 1:
            raise OSError(28, "No space left on device")
        real(descriptor)

    writer = IndexedWriter(tmp_path / "d", "uint16")
    writer.add_document(np.arange(10, 13))
    writer.add_document(np.arange(20, 23))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(DataError, match="No space left"):
            writer.close()
    assert not list(tmp_path.glob(".*"))
    if old and fail_at < 2:
        assert IndexedReader(tmp_path / "d").tokens.tolist() == [0, 1, 0, 1, 2, 3]
    else:
        with pytest.raises(DataError, match="no such file"):
            IndexedReader(tmp_path / "d")


def test_what_makes_a_missing_data_set_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        IndexedReader(tmp_path / "wiki")
    assert caught.value.hint == (
        f"create it with mega data preprocess --input FILE --tokenizer FOLDER --output {tmp_path / 'wiki'}"
    )


def damage(path: Path, at: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[at : at + len(data)] = data
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("suffix", "at", "data", "message"),
    [
        ("idx", 0, b"X", "not an index"),
        ("idx", 9, struct.pack("<Q", 2), "has format version 2"),
        ("idx", 17, b"\x09", "dtype code 9 is unknown"),
        ("idx", 17, b"\x07", "float32"),
        ("idx", 17, b"\x04", "sequence 1 begins at byte 10"),
        ("idx", 18, struct.pack("<Q", 10**12), "its header"),
        ("idx", 34, struct.pack("<i", -5), "sequence 0 has -5 tokens"),
        ("idx", 34 + 4 * 200 + 8, struct.pack("<q", 3), "sequence 1 begins at byte 3"),
        ("idx", 34 + 12 * 200 + 8, struct.pack("<q", -3), "document index"),
    ],
)
def test_damage_is_told(tmp_path: Path, suffix: str, at: int, data: bytes, message: str) -> None:
    write(tmp_path / "d", reference_documents())
    damage(tmp_path / f"d.{suffix}", at, data)
    with pytest.raises(DataError, match=message) as caught:
        IndexedReader(tmp_path / "d")
    assert str(tmp_path / "d.idx") in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 20, 33, 34, 100, 4041])
def test_truncated_index(tmp_path: Path, keep: int) -> None:
    write(tmp_path / "d", reference_documents())
    os.truncate(tmp_path / "d.idx", keep)
    with pytest.raises(DataError, match=r"d\.idx"):
        IndexedReader(tmp_path / "d")


@pytest.mark.parametrize("size", [0, 1, 19_872, 19_876])
def test_wrong_size_of_bin(tmp_path: Path, size: int) -> None:
    write(tmp_path / "d", reference_documents())
    os.truncate(tmp_path / "d.bin", size)
    with pytest.raises(DataError, match=rf"d\.bin: has {size:,} bytes, but d\.idx requires 19,874"):
        IndexedReader(tmp_path / "d")


def test_missing_file_names_the_neighbors(tmp_path: Path) -> None:
    write(tmp_path / "wiki_text_document", reference_documents(2))
    with pytest.raises(DataError, match="wiki_text_document"):
        IndexedReader(tmp_path / "wiki")


def test_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    documents = reference_documents()
    same, other = write(tmp_path / "a", documents), write(tmp_path / "b", documents)
    assert same.fingerprint == other.fingerprint
    assert write(tmp_path / "c", [d[::-1] for d in documents]).fingerprint != same.fingerprint
    assert write(tmp_path / "c", documents[::-1]).fingerprint != same.fingerprint


def test_megatron_reads_ours_and_we_read_megatrons(tmp_path: Path) -> None:
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="the oracle is not installed")
    torch = pytest.importorskip("torch", reason="the oracle takes torch tensors")
    documents = reference_documents(50)
    write(tmp_path / "ours", documents)
    read = theirs.IndexedDataset(str(tmp_path / "ours"))
    assert [read[i].tolist() for i in range(len(read))] == [d.tolist() for d in documents]

    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    builder.add_document(torch.arange(9), [4, 5])
    builder.add_document(torch.arange(3), [3])
    builder.finalize(str(tmp_path / "theirs.idx"))
    reader = IndexedReader(tmp_path / "theirs")
    assert reader.document_index.tolist() == [0, 2, 3]
    assert [reader.read_sequence(i).tolist() for i in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7, 8], [0, 1, 2]]
