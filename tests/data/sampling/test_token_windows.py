from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_common.errors import DataError
from mega_data.sampling.document_order import DocumentOrder
from mega_data.sampling.token_windows import (
    MegatronTokenWindows,
    ShuffledTokenWindows,
    StableTokenWindows,
    build_megatron_indices,
)
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.indexed_writer import IndexedWriter

REFERENCE = np.array([(i * 37) % 91 + 5 for i in range(200)], np.int32)


def data_set(prefix: Path, lengths: list[int], first_token: int = 0) -> IndexedReader:
    """Token number i of the data set is first_token + i, so a sample shows where it was read."""
    with IndexedWriter(prefix, "int32") as writer:
        writer.add_documents(np.arange(first_token, first_token + sum(lengths)), lengths)
    return IndexedReader(prefix)


def md5(values: np.ndarray) -> str:
    return hashlib.md5(np.ascontiguousarray(values)).hexdigest()


def test_megatron_indices_have_megatrons_bytes() -> None:
    indices = build_megatron_indices(REFERENCE, 0, 180, 64, 300, 1234)
    assert indices["document"].dtype == np.int32
    assert indices["sample"].dtype == np.int32
    assert indices["shuffle"].dtype == np.uint32
    assert md5(indices["document"]) == "dd4393d8f2a64ded84572db9d38ee08b"
    assert md5(indices["sample"]) == "74dec1872990482f81f879732604b4af"
    assert md5(indices["shuffle"]) == "0da57ad1afc8473dc87e017f8954b7e8"


def walked(lengths: np.ndarray, document: np.ndarray, seq_length: int) -> list[tuple[int, int]]:
    """The sample index, token by token."""
    tokens = [(row, offset) for row, i in enumerate(document) for offset in range(lengths[i])]
    rows = tokens[: (len(tokens) - 1) // seq_length * seq_length + 1 : seq_length]
    return [(0, 0), *rows[1:]]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any),
    st.integers(1, 12),
    st.integers(1, 60),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=100, deadline=None)
def test_sample_index_is_the_walk_over_the_tokens(sizes: list[int], seq: int, samples: int, seed: int) -> None:
    lengths = np.array(sizes, np.int32)
    indices = build_megatron_indices(lengths, 0, len(sizes), seq, samples, seed)
    assert [tuple(row) for row in indices["sample"].tolist()] == walked(lengths, indices["document"], seq)
    assert sorted(indices["shuffle"].tolist()) == list(range(len(indices["sample"]) - 1))
    assert len(indices["shuffle"]) >= samples


def test_megatron_sample_reads_its_tokens(tmp_path: Path) -> None:
    reader = data_set(tmp_path / "d", [7, 0, 3, 20, 1])
    samples = MegatronTokenWindows(reader, 0, 5, seq_length=4, seed=1, num_samples=7, cache=tmp_path)
    read = [samples[k] for k in range(len(samples))]
    assert all(len(window) == 5 for window in read)
    labels = Counter(int(token) for window in read for token in window[1:])
    assert len(samples) == 7
    assert set(labels.values()) == {1}
    with pytest.raises(DataError, match="sample 7 of 7"):
        samples[7]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(1, 40), st.integers(0, 99), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_stable_epoch_predicts_every_token_once_but_the_rest(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq: int, seed: int, epoch: int
) -> None:
    reader = data_set(tmp_path_factory.mktemp("d") / "d", lengths)
    samples, total = StableTokenWindows(reader, 0, len(lengths), seq_length=seq, seed=seed), sum(lengths)
    per_epoch = max(1, total // seq)
    windows = [samples[k] for k in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
    for window in windows:
        assert window.dtype == np.int64
        assert window.tolist() == [(window[0] + i) % total for i in range(seq + 1)]
    labels = Counter(int(token) for window in windows for token in window[1:])
    if total >= seq:
        assert set(labels.values()) == {1}
        assert total - len(labels) == total % seq
    else:
        assert len(labels) == total


def test_stable_order_depends_on_seed_epoch_and_content_not_on_the_path(tmp_path: Path) -> None:
    lengths = [50] * 20

    def starts(reader: IndexedReader, seed: int = 1, epoch: int = 0) -> list[int]:
        samples = StableTokenWindows(reader, 0, 20, seq_length=10, seed=seed)
        return [samples.locate_window(k) for k in range(100 * epoch, 100 * epoch + 100)]

    reader = data_set(tmp_path / "a", lengths)
    first = starts(reader)
    assert starts(data_set(tmp_path / "elsewhere" / "b", lengths)) == first
    others = [starts(reader, seed=2), starts(reader, epoch=1), starts(data_set(tmp_path / "c", lengths, 1))]
    assert all(other != first for other in others)
    assert first != sorted(first)


def test_stable_order_is_fixed_for_ever(tmp_path: Path) -> None:
    """A change of these numbers breaks the resume of every run."""
    samples = StableTokenWindows(data_set(tmp_path / "d", [100] * 10), 0, 10, seq_length=16, seed=1234)
    assert [samples.locate_window(k) for k in (0, 1, 2, 61, 62, 10**12)] == [301, 533, 549, 141, 594, 737]


def test_a_range_reads_only_its_sequences(tmp_path: Path) -> None:
    reader = data_set(tmp_path / "d", [10] * 10)
    stable = StableTokenWindows(reader, 3, 6, seq_length=7, seed=0)
    megatron = MegatronTokenWindows(reader, 3, 6, seq_length=7, seed=0, num_samples=20, cache=tmp_path)
    for samples in (stable, megatron):
        seen = {int(token) for k in range(20) for token in samples[k]}
        assert seen == set(range(30, 60))
    with pytest.raises(DataError, match="has no token in its sequences 4 to 4"):
        StableTokenWindows(reader, 4, 4, seq_length=7, seed=0)


def windows(prefix: Path, cache: Path) -> list[list[int]]:
    reader = IndexedReader(prefix)
    samples = MegatronTokenWindows(reader, 0, len(reader), seq_length=5, seed=3, num_samples=30, cache=cache)
    return [samples[k].tolist() for k in range(30)]


def test_index_cache_is_used_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_set(tmp_path / "d", [9, 8, 7])
    built = windows(tmp_path / "d", tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.setattr("mega_data.sampling.token_windows.build_megatron_indices", None)
    assert windows(tmp_path / "d", tmp_path / "cache") == built


def test_data_regenerated_in_place_does_not_meet_its_old_index(tmp_path: Path) -> None:
    data_set(tmp_path / "d", [9, 8, 7])
    windows(tmp_path / "d", tmp_path / "cache")
    for lengths, first_token in (([7, 8, 9], 0), ([9, 8, 7], 5)):
        data_set(tmp_path / "d", lengths, first_token)
        assert windows(tmp_path / "d", tmp_path / "cache") == windows(tmp_path / "d", tmp_path / "fresh")
    assert len(list((tmp_path / "cache").iterdir())) == 3


@pytest.mark.parametrize("at", [0, 3, 9, 20, 100, -1])
@pytest.mark.parametrize("kind", ["flip", "cut"])
def test_damaged_index_cache_is_made_anew(tmp_path: Path, kind: str, at: int) -> None:
    data_set(tmp_path / "d", [9, 8, 7])
    built = windows(tmp_path / "d", tmp_path / "cache")
    path = next((tmp_path / "cache").iterdir())
    whole = path.read_bytes()
    raw = bytearray(whole)
    raw[at] ^= 1
    path.write_bytes(raw if kind == "flip" else whole[:at])
    assert windows(tmp_path / "d", tmp_path / "cache") == built
    assert path.read_bytes() == whole


def test_cache_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    data_set(tmp_path / "d", [9, 8, 7])
    (tmp_path / "file").write_text("not a folder")
    assert windows(tmp_path / "d", tmp_path / "file") == windows(tmp_path / "d", tmp_path / "cache")


# ---- documents in an order of their own


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_shuffled_epoch_has_each_token_as_label_once_in_documents_that_are_whole(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq: int, seed: int
) -> None:
    folder, total = tmp_path_factory.mktemp("d"), sum(lengths)
    reader = data_set(folder / "d", lengths)
    samples = ShuffledTokenWindows(reader, 0, len(lengths), seq_length=seq, seed=seed, cache=folder)
    per_epoch = int(samples.samples_per_epoch)
    ends, begins = set((np.cumsum(lengths) - 1).tolist()), {int(p) // 4 for p in reader.pointers}
    labels: Counter[int] = Counter()
    for k in range(2 * per_epoch, 3 * per_epoch):
        window = samples[k].tolist()
        assert len(window) == seq + 1
        for token, label in pairwise(window):
            assert label == token + 1 if token not in ends else label in begins
        labels.update(window[1:])
    assert total < seq or (set(labels.values()) == {1} and total - len(labels) == total % seq)


def test_shuffled_documents_stand_in_every_place_and_a_split_keeps_to_its_own(tmp_path: Path) -> None:
    lengths = [3] * 400
    reader = data_set(tmp_path / "d", lengths)

    def order(seed: int, first: int = 0, last: int = 400) -> list[int]:
        drawn = DocumentOrder(reader, first, last, seed=seed, cache=tmp_path)
        return np.concatenate(list(drawn.read_tokens(0, 3 * (last - first))))[::3].tolist()

    first = order(1)
    assert sorted(first) == list(range(0, 1200, 3))
    assert sum(a + 3 == b for a, b in pairwise(first)) < 10
    assert order(2) != first
    assert sorted(order(1, 100, 150)) == list(range(300, 450, 3))


def test_a_document_of_several_sequences_stays_whole_and_one_that_a_split_cuts_gives_its_part(tmp_path: Path) -> None:
    data_set(tmp_path / "d", [2] * 60)
    raw, bounds = bytearray((tmp_path / "d.idx").read_bytes()), np.arange(0, 61, 3)
    raw[26:34] = bounds.size.to_bytes(8, "little")
    (tmp_path / "d.idx").write_bytes(bytes(raw[: -61 * 8]) + bounds.tobytes())
    reader = IndexedReader(tmp_path / "d")
    drawn = DocumentOrder(reader, 4, 50, seed=1, cache=tmp_path)
    tokens = np.concatenate(list(drawn.read_tokens(0, 92))).tolist()
    assert sorted(tokens) == list(range(8, 100))
    breaks = [b for a, b in pairwise(tokens) if b != a + 1]
    assert len(breaks) > 10
    assert all(b % 6 == 0 or b == 8 for b in breaks)


def test_shuffled_order_is_fixed_for_ever(tmp_path: Path) -> None:
    """A change of these numbers breaks the resume of every run."""
    reader = data_set(tmp_path / "d", [5, 1, 8, 3, 9, 2, 7] * 10)
    samples = ShuffledTokenWindows(reader, 3, 60, seq_length=7, seed=11, cache=tmp_path)
    assert [samples[k].tolist()[:3] for k in (0, 1, 2, 10**9)] == [
        [38, 39, 133],
        [77, 78, 79],
        [138, 139, 251],
        [48, 273, 274],
    ]
