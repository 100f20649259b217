from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_data.blended_dataset import BlendedDataset, build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.sampling.staged_blend import resume_data_config
from mega_data.token_files.indexed_writer import IndexedWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate(("a", "b", "c")):
        with IndexedWriter(tmp_path / name, "int32") as writer:
            writer.add_documents(np.arange(number * 10_000, number * 10_000 + 4000), [40] * 100)
    return tmp_path


def config(folder: Path, weights: dict[str, float], **fields: Any) -> DataConfig:
    train = [{"path": str(folder / name), "weight": weight} for name, weight in weights.items()]
    return DataConfig.parse({"train": train or "-", "seq_length": 8, "split": [1], **fields})


def opened(config: DataConfig) -> BlendedDataset:
    return build_blended_datasets(config, seed=1, samples={"train": 1}, eod=None)[0]


def went_on(now: DataConfig, was: DataConfig, consumed: int) -> DataConfig:
    return resume_data_config(now, was.model_dump(mode="json"), consumed, opened(was).count_samples_by_path(consumed))


def read_of(config: DataConfig, name: int, first: int, last: int) -> list[list[int]]:
    """The windows of one data set among these samples."""
    windows = [opened_sample.tokens.tolist() for opened_sample in map(opened(config).__getitem__, range(first, last))]
    return [window for window in windows if window[0] // 10_000 == name]


def test_a_changed_blend_goes_on_with_each_data_sets_next_sample(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = config(folder, {"a": 3, "b": 1}, order="stable")
    with caplog.at_level("INFO"):
        second = went_on(config(folder, {"c": 1, "b": 1, "a": 2}), first, 200)
    assert second.begun is not None
    assert (second.order, second.begun.samples) == ("stable", 200)
    assert f"the blend changes at sample 200: {folder}/b continues after 50 of its samples" in caplog.text
    third = went_on(config(folder, {"a": 1}), second, 300)
    alone = config(folder, {"a": 1}, order="stable")
    expected = [opened(alone)[k].tokens.tolist() for k in range(250)]
    assert [*read_of(first, 0, 0, 200), *read_of(second, 0, 200, 300), *read_of(third, 0, 300, 350)] == expected
    assert len(read_of(second, 2, 200, 300)) == 25


def test_the_same_blend_goes_on_as_it_was_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    first = config(folder, {"a": 3, "b": 1})
    assert went_on(first, first, 200).begun is None
    changed = went_on(config(folder, {"a": 1, "b": 1}), first, 200)
    again = went_on(config(folder, {"a": 1, "b": 1}), changed, 260)
    assert again == changed
    (tmp_path / "moved").mkdir()
    for name in ("a", "b"):
        for suffix in (".bin", ".idx"):
            (folder / f"{name}{suffix}").rename(tmp_path / "moved" / f"{name}{suffix}")
    read = {str(folder / "a"): 180, str(folder / "b"): 80}
    moved = resume_data_config(config(tmp_path / "moved", {"a": 1, "b": 1}), changed.model_dump(mode="json"), 260, read)
    assert moved.begun is not None
    assert moved.begun.samples == 200
    assert moved.begun.read == {str(tmp_path / "moved" / "a"): 150, str(tmp_path / "moved" / "b"): 50}


def test_a_run_keeps_its_order_and_one_of_an_older_version_is_stable(folder: Path) -> None:
    asked = config(folder, {"a": 3, "b": 1})
    saved = asked.model_dump(mode="json")
    assert asked.sample_order == "shuffled"
    older = {key: value for key, value in saved.items() if key in ("train", "split", "seq_length")}
    for order, kept in (("stable", "stable"), ("shuffled", "shuffled"), ("megatron", "megatron"), (None, "stable")):
        assert resume_data_config(asked, {**older, "order": order}, 100, None).order == kept
    assert resume_data_config(asked, older, 100, None).begun is None
    assert resume_data_config(config(folder, {"a": 3, "b": 1}, order="shuffled"), older, 100, None).order == "shuffled"
    changed = resume_data_config(config(folder, {"a": 1, "b": 1}), older, 100, None)
    assert changed.begun is not None
    assert changed.begun.read == {str(folder / "a"): 75, str(folder / "b"): 25}


def test_a_glob_that_matches_more_is_a_change(folder: Path) -> None:
    first = DataConfig.parse({"train": f"{folder}/[ab]*", "seq_length": 8, "split": [1], "order": "shuffled"})
    read = opened(first).count_samples_by_path(100)
    with IndexedWriter(folder / "b2", "int32") as writer:
        writer.add_documents(np.arange(400), [40] * 10)
    second = resume_data_config(first, first.model_dump(mode="json"), 100, read)
    assert second.begun is not None
    assert second.begun.read == read


def test_validation_is_the_same_whatever_becomes_of_the_blend(folder: Path) -> None:
    plain = config(folder, {"a": 3, "b": 1}, split=[1, 1], order="stable")
    train = [
        {"path": str(folder / "a"), "weight": 3, "max_epochs": 0.1},
        {"path": str(folder / "b"), "max_epochs": 0.1},
    ]
    changed = resume_data_config(
        config(folder, {}, split=[1, 1], train=train), plain.model_dump(mode="json"), 10, {str(folder / "a"): 8}
    )
    assert changed.begun is not None

    def valid(config: DataConfig) -> list[list[int]]:
        held_out = build_blended_datasets(config, seed=1, samples={"train": 1, "valid": 1}, eod=None)[1]
        assert held_out is not None
        return [held_out[k].tokens.tolist() for k in range(100)]

    assert valid(changed) == valid(plain)


def test_epochs_are_of_entries_as_they_stand(folder: Path) -> None:
    entries = [{"path": f"{folder}/[ab]"}, {"path": f"{folder}/c", "weight": 1, "max_epochs": 0.5}]
    train = opened(DataConfig.parse({"train": entries, "seq_length": 8, "split": [1]}))
    assert train.count_epochs_by_path(400) == {f"{folder}/[ab]": 0.2, f"{folder}/c": 0.4}
    assert train.count_epochs_by_path(1500) == {f"{folder}/[ab]": 1.25, f"{folder}/c": 0.5}
