from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chunked_data import documents, found
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_common.errors import ConfigError, DataError
from mega_data.batch_loader import BatchLoader
from mega_data.blended_dataset import BlendedDataset, build_blended_datasets, plan_dataset_usage
from mega_data.data_config import DataConfig
from mega_data.kinds.dataset_kind import TrainingSample
from mega_data.reports.show_tokens import split_sample_for_display
from mega_data.retrieval.neighbor_files import DatasetNeighbors, get_neighbors_path

M, S = 8, 32
EOD = 5
ROWS = np.random.default_rng(3).integers(0, 60, (30, 21)).tolist()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 documents of 3 chunks, of which a run's default split trains on 29."""
    folder = tmp_path_factory.mktemp("retro")
    documents(folder / "d", ROWS)
    found(folder, folder / "d", split=(969, 30, 1))
    return folder / "d"


def built(train: Any, **fields: Any) -> BlendedDataset:
    config = DataConfig.parse({"train": train, "kind": "retro", "seq_length": S, **fields})
    return build_blended_datasets(config, seed=1, samples={"train": 4}, eod=EOD)[0]


def pieces(sample: TrainingSample) -> list[list[int]]:
    """What a sample has of each document: its tokens and last label, where each is followed by its own label."""
    ids = sample.document_ids
    assert ids is not None
    assert sample.neighbors is not None
    parts = []
    for number in range(ids.max() + 1):
        own = (ids == number) & (sample.loss_weights > 0)
        assert np.flatnonzero(ids == number)[0] % M == 0
        if own.any():
            assert sample.tokens[own][1:].tolist() == sample.labels[own][:-1].tolist()
            assert sample.position_ids[own].tolist() == list(range(own.sum()))
            parts.append([*sample.tokens[own].tolist(), int(sample.labels[own][-1])])
    return parts


@pytest.mark.parametrize("order", ["shuffled", "stable"])
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
@settings(max_examples=8, deadline=None)
def test_every_token_but_a_documents_first_is_a_label_once_an_epoch(
    tmp_path_factory: pytest.TempPathFactory, order: str, lengths: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("d")
    begins = np.cumsum([0, *lengths])
    documents(folder / "d", [range(begin, begin + size) for begin, size in zip(begins, lengths, strict=False)])
    found(folder, folder / "d", split=(1,), chunk_length=M, neighbors=1)
    rules = {"reset_attention_mask": True, "reset_position_ids": True, "split": [1], "order": order}
    samples = built(folder / "d", **{**rules, "seq_length": M})
    count = int(samples.samples_per_epoch)
    assert count == sum(-(-size // M) for size in lengths)
    expected = sorted(
        label + 7 for first, size in zip(begins, lengths, strict=False) for label in range(first + 1, first + size)
    )
    for epoch in (0, 2):
        read = [samples[k] for k in range(epoch * count, (epoch + 1) * count)]
        assert sorted(int(t) for sample in read for t in sample.labels[sample.loss_weights > 0]) == expected
        assert all(sample.tokens.shape == (M,) for sample in read)


@pytest.mark.parametrize("order", ["shuffled", "stable"])
def test_neighbors_are_those_of_the_chunks_of_a_sample(data: Path, order: str) -> None:
    samples = built(data, order=order, reset_attention_mask=True, reset_position_ids=True)
    neighbors = DatasetNeighbors(get_neighbors_path(data), samples._parts[0].reader)
    chunks = neighbors.chunks
    texts = chunks.read_tokens(np.arange(len(chunks)), M)
    found_at: set[int] = set()
    for k in range(int(samples.samples_per_epoch)):
        sample = samples[k]
        pieces(sample)
        assert sample.neighbors is not None
        for number, chunk in enumerate(sample.tokens.reshape(-1, M)):
            (own,) = np.flatnonzero((np.where(texts < 0, EOD, texts) == chunk).all(1))
            np.testing.assert_array_equal(sample.neighbors[number], neighbors.read_neighbor_tokens(np.array([own]))[0])
            found_at.add(int(own))
    assert len(found_at) >= 84  # of the 87 of train's 29 documents those that whole samples have
    assert max(found_at) < 87


def test_padding_has_no_loss_and_documents_are_open_unless_asked(data: Path) -> None:
    sample, closed = built(data, order="stable")[0], built(data, order="stable", reset_attention_mask=True)[0]
    assert sample.document_ids is None
    assert closed.document_ids is not None
    np.testing.assert_array_equal(sample.position_ids, np.arange(S))
    ends = np.flatnonzero(np.diff(closed.document_ids)) + 1
    for end in ends:  # 21 tokens in 3 chunks: three of padding, and the last token has no label
        assert sample.tokens[end - 3 : end].tolist() == [EOD] * 3
        assert sample.loss_weights[end - 5 : end].tolist() == [1, 0, 0, 0, 0]
    assert sample.loss_weights.sum() == S - 4 * ends.size


def test_blends_loaders_and_resumed_runs_read_the_same(data: Path, tmp_path: Path) -> None:
    documents(tmp_path / "text", ROWS)
    blend = [{"path": data, "weight": 1}, {"path": tmp_path / "text", "kind": "text", "weight": 1}]
    samples = built(blend)
    steps = BatchLoader(samples, global_batch=4, seq_length=S)
    first, second = (batch for batch, _ in zip(steps, range(2), strict=False))
    assert first.neighbors is not None
    assert second.neighbors is not None
    assert first.neighbors.shape == (4, S // M, 2, 2 * M)
    retrieved = (first.neighbors >= 0).any((1, 2, 3))
    assert retrieved.sum() == 2
    again = next(iter(BatchLoader(built(blend), global_batch=4, seq_length=S, consumed_samples=4)))
    for name in ("tokens", "labels", "neighbors"):
        np.testing.assert_array_equal(getattr(second, name), getattr(again, name))
    plain = next(iter(BatchLoader(built(tmp_path / "text", kind="text"), global_batch=4, seq_length=S)))
    assert plain.neighbors is None
    assert samples.fingerprint == built(blend).fingerprint


def test_other_neighbors_are_other_data(data: Path, tmp_path: Path) -> None:
    before = built(data).fingerprint
    reader = documents(tmp_path / "d", ROWS)
    found(tmp_path, reader.prefix, split=(969, 30, 1), neighbors=1)
    other = get_neighbors_path(reader.prefix)
    assert built({"path": data, "neighbors": other}).fingerprint != before
    with pytest.raises(
        ConfigError,
        match=r"equal neighbor counts and chunk lengths \(.*: 2 neighbors, chunk length 8; .*: 1 neighbors, chunk length 8\)",
    ):
        built([data, {"path": data, "neighbors": other}])


def test_validation_is_never_found(data: Path, tmp_path: Path) -> None:
    config = DataConfig.parse({"train": data, "kind": "retro", "seq_length": S})
    _, valid, _ = build_blended_datasets(config, seed=1, samples={"train": 1, "valid": 1}, eod=EOD)
    assert valid is not None
    shown: npt.NDArray[np.int64] = valid[0].neighbors if valid[0].neighbors is not None else np.empty(0, np.int64)
    assert shown.size
    with pytest.raises(DataError, match=r"chunks 0 to 87, which overlap this split of the run \(0 to 45\)"):
        built(data, split=[0.5, 0.5])
    with pytest.raises(DataError, match=r"chunks 0 to 87, which overlap"):
        plan_dataset_usage(DataConfig.parse({"train": data, "kind": "retro", "split": [1, 1]}), {"train": 1}, EOD)


def test_what_a_run_reads_is_counted_with_padding(data: Path) -> None:
    config = DataConfig.parse({"train": data, "kind": "retro", "seq_length": S})
    (use,) = plan_dataset_usage(config, {"train": 87}, EOD)
    assert use.epochs == pytest.approx(4)
    assert built(data).samples_per_epoch == 87 * M // S


def test_neighbors_are_shown_behind_the_documents(data: Path) -> None:
    sample = built(data)[0]
    assert sample.neighbors is not None
    shown = [part for part in split_sample_for_display(sample, None) if part.name.startswith("neighbor")]
    assert len(shown) == 8
    assert shown[3].name == "neighbor 1 of the chunk at 8-15"
    first = sample.neighbors[1, 1]
    assert [token.id for token in shown[3].tokens] == first[first >= 0].tolist()


def test_mistakes_are_one_sentence(data: Path, tmp_path: Path) -> None:
    documents(tmp_path / "d", ROWS)
    with pytest.raises(DataError, match=r"info.json: the neighbors are missing or incomplete"):
        built(tmp_path / "d")
    with pytest.raises(ConfigError, match=r"data.seq_length = 30: must be a multiple of 8"):
        built(data, seq_length=30)
    with pytest.raises(ConfigError, match=r"kind retro is not supported with data.order = megatron"):
        built(data, order="megatron")
    with pytest.raises(ConfigError, match=r"train.0.neighbors.*requires kind: retro"):
        built({"path": data, "neighbors": "x"}, kind="text")
    with pytest.raises(ConfigError, match=r"train.0.neighbors.*with a glob as path"):
        built({"path": f"{data}*", "neighbors": "x"})
