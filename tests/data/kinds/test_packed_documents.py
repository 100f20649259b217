from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_common.errors import ConfigError, DataError
from mega_data.blended_dataset import build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.kinds.dataset_kind import DatasetContext, TrainingSample
from mega_data.kinds.packed_documents import PackedSamples, assign_bins_best_fit
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.loss_mask import LossWeights


def one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """The rooms that are left, by the definition."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= size]
        if not fitting:
            rooms.append(capacity)
        rooms[min(fitting)[1] if fitting else -1] -= size
    return sorted(rooms)


@given(st.integers(1, 70), st.lists(st.integers(1, 70), max_size=120))
@settings(max_examples=150, deadline=None)
def test_items_of_a_size_at_once_fit_as_one_by_one(capacity: int, drawn: list[int]) -> None:
    sizes = [size for size in drawn if size <= capacity]
    bins = assign_bins_best_fit(np.array(sizes, np.int64), capacity)
    rooms = capacity - np.bincount(bins, sizes) if sizes else np.empty(0)
    assert sorted(rooms.astype(int).tolist()) == one_by_one(sizes, capacity)


def test_equal_items_go_to_bins_in_their_order() -> None:
    assert assign_bins_best_fit(np.array([2, 3, 2, 3, 1]), 6).tolist() == [1, 0, 1, 0, 1]


S = 16


def data_set(prefix: Path, lengths: list[int]) -> IndexedReader:
    """Token number i is 10 + i, so a sample shows where it was read."""
    with IndexedWriter(prefix, "int32") as writer:
        writer.add_documents(np.arange(10, 10 + sum(lengths)), lengths)
    return IndexedReader(prefix)


def packed(reader: IndexedReader, seed: int = 1, weights: Any = None, **fields: Any) -> PackedSamples:
    config = DataConfig.parse({"train": "-", "seq_length": S, **fields})
    part = DatasetPart(reader, 0, len(reader), None, "documents")
    return PackedSamples(part, DatasetContext(config, seed, 0, reader.prefix.parent / "cache"), weights=weights)


def documents_of(sample: TrainingSample) -> list[list[int]]:
    """The documents of a sample, each its tokens and last label."""
    assert sample.document_ids is not None
    found = []
    for number in range(sample.document_ids.max() + 1):
        own = (sample.document_ids == number) & (sample.loss_weights > 0)
        if own.any():
            assert sample.position_ids[own].tolist() == list(range(own.sum()))
            assert sample.tokens[own][1:].tolist() == sample.labels[own][:-1].tolist()
            found.append([*sample.tokens[own].tolist(), int(sample.labels[own][-1])])
    return found


@given(st.lists(st.integers(0, S + 1), min_size=1, max_size=60).filter(lambda sizes: max(sizes) > 1), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_every_document_once_an_epoch_and_whole(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int
) -> None:
    reader = data_set(tmp_path_factory.mktemp("d") / "d", lengths)
    samples = packed(reader, seed)
    count = int(samples.samples_per_epoch)
    expected = sorted(reader.read_sequence(i).tolist() for i in range(len(lengths)) if lengths[i] > 1)
    for epoch in (0, 3):
        found = [samples[k] for k in range(epoch * count, (epoch + 1) * count)]
        assert sorted(document for sample in found for document in documents_of(sample)) == expected
        assert all(sample.tokens.shape == (S,) for sample in found)


def test_what_is_no_document_is_padding_and_an_end_of_its_own(tmp_path: Path) -> None:
    sample = packed(data_set(tmp_path / "d", [5, 8]))[0]
    assert sample.tokens.tolist() == [10, 11, 12, 13, 15, 16, 17, 18, 19, 20, 21, 0, 0, 0, 0, 0]
    assert sample.labels.tolist() == [11, 12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 0, 0, 0, 0, 0]
    assert sample.loss_weights.tolist() == [1.0] * 11 + [0.0] * 5
    assert sample.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]
    assert sample.document_ids is not None
    assert sample.document_ids.tolist() == [0] * 4 + [1] * 7 + [2] * 5
    assert packed(data_set(tmp_path / "d", [5, 8])).estimate_attention_work(np.array([0])).tolist() == [16 + 49]


class Weights(LossWeights):
    """Of token t: t."""

    fingerprint = "theirs"

    def __init__(self) -> None: ...

    def __getitem__(self, tokens: slice) -> Any:
        return np.arange(tokens.start, tokens.stop, dtype=np.float32)


def test_weights_beside_the_tokens_are_those_of_the_labels(tmp_path: Path) -> None:
    reader = data_set(tmp_path / "d", [5, 8])
    samples = packed(reader, weights=Weights())
    assert samples[0].loss_weights.tolist() == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("rule", "labels"), [("split", 36 + 2 + 16), ("drop", 2 + 16)])
def test_long_documents_are_cut_into_pieces_or_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rule: str, labels: int
) -> None:
    samples = packed(data_set(tmp_path / "d", [37, 3, 1, 17]), long_documents=rule)
    with caplog.at_level("INFO"):
        found = [document for k in range(int(samples.samples_per_epoch)) for document in documents_of(samples[k])]
    assert sum(len(document) - 1 for document in found) == labels
    told = {"split": "1 documents longer than seq_length + 1 = 17 split", "drop": "left out, 1 of fewer than two"}
    assert told[rule] in caplog.text
    if rule == "split":  # each label once: a piece begins with the last label of the one before
        assert sorted(label for document in found for label in document[1:]) == sorted(
            {*range(11, 47), 48, 49, *range(52, 68)}
        )


def test_order_is_a_function_of_seed_content_and_number(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(2, 18, 300).tolist()
    one, copy = data_set(tmp_path / "a", lengths), data_set(tmp_path / "elsewhere", lengths)

    def tokens(samples: PackedSamples, first: int = 0) -> list[list[int]]:
        return [samples[k].tokens.tolist() for k in range(first, first + 40)]

    first = tokens(packed(one))
    assert tokens(packed(copy)) == first
    assert tokens(packed(one, seed=2)) != first
    assert tokens(packed(one), int(packed(one).samples_per_epoch)) != first


def test_a_log_normal_corpus_fills_99_per_cent(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).lognormal(6.2, 1.2, 4000).astype(np.int64) + 2
    with IndexedWriter(tmp_path / "d", "uint16") as writer:
        writer.add_documents(np.ones(lengths.sum(), np.uint16), lengths)
    samples = packed(IndexedReader(tmp_path / "d"), seq_length=4096)
    count = int(samples.samples_per_epoch)
    used = sum(samples[k].loss_weights.sum() for k in range(count))
    assert used == (lengths - 1).sum()
    assert used / (count * 4096) >= 0.99


def test_documents_of_several_sequences_and_a_split(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "int32") as writer:
        writer.add_documents(np.arange(10, 70), [3] * 20)
    raw = bytearray((tmp_path / "d.idx").read_bytes())
    raw[-21 * 8 :] = b""
    bounds = np.arange(0, 21, 4, dtype=np.int64)
    raw[26:34] = bounds.size.to_bytes(8, "little")
    (tmp_path / "d.idx").write_bytes(bytes(raw) + bounds.tobytes())
    config = DataConfig.parse({"train": tmp_path / "d", "kind": "documents", "seq_length": S, "split": [6, 4, 0]})
    train, valid, _ = build_blended_datasets(config, seed=1, samples={"train": 1, "valid": 1}, eod=0)
    assert valid is not None
    assert sorted(document for k in range(3) for document in documents_of(train[k])) == blocks(0, 12, 24)
    assert sorted(document for k in range(2) for document in documents_of(valid[k])) == blocks(36, 48)


def blocks(*starts: int) -> list[list[int]]:
    return [[*range(10 + start, 22 + start)] for start in starts]


def test_nothing_to_pack_and_megatrons_order_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of its 3 documents has from 2 to seq_length"):
        packed(data_set(tmp_path / "d", [1, 40, 0]), long_documents="drop")[0]
    config = DataConfig.parse({"train": tmp_path / "d", "kind": "documents", "order": "megatron"})
    with pytest.raises(ConfigError, match="which has no packing"):
        build_blended_datasets(config, seed=1, samples={"train": 1}, eod=0)
