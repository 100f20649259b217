"""Preference pairs: what a loss that compares them needs lies side by side, whole, once an epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_common.errors import ConfigError, DataError
from mega_data.blended_dataset import build_blended_datasets
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.data_config import DataConfig
from mega_data.kinds import get_dataset_builders
from mega_data.kinds.chat_samples import PreferencePairSamples
from mega_data.kinds.dataset_kind import DatasetContext
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.reports.show_tokens import split_sample_for_display
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.token_files.indexed_reader import IndexedReader, get_loss_mask_prefix
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import train_tokenizer

S = 32


def data_set(prefix: Path, lengths: list[int]) -> IndexedReader:
    """A document for every two lengths; token number i is 10 + i, and counts 1 or 2, but the first of a sequence."""
    tokens = np.arange(10, 10 + sum(lengths))
    counts = 1 + tokens % 2
    counts[np.cumsum([0, *lengths[:-1]])] = 0
    for path, values, dtype in ((prefix, tokens, "int32"), (get_loss_mask_prefix(prefix), counts, "uint8")):
        with IndexedWriter(path, dtype) as writer:
            at = 0
            for first, second in zip(lengths[::2], lengths[1::2], strict=False):
                writer.write_tokens(values[at : at + first + second].astype(dtype))
                writer.end_documents([first, second], [2])
                at += first + second
    return IndexedReader(prefix)


def pairs(reader: IndexedReader, **fields: Any) -> PreferencePairSamples:
    config = DataConfig.parse({"train": "-", "seq_length": S, "kind": "pairs", **fields})
    part = DatasetPart(reader, 0, len(reader), None, "pairs")
    made: PreferencePairSamples = get_dataset_builders()["pairs"](
        part, DatasetContext(config, 1, 0, reader.prefix.parent / "cache"), 0
    )  # type: ignore[assignment]
    return made


@given(st.lists(st.tuples(st.integers(2, S), st.integers(2, S)), max_size=20))
@settings(max_examples=30, deadline=None)
def test_every_pair_that_fits_once_an_epoch_with_its_weights(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]]
) -> None:
    sizes = [(3, 4), *sizes]  # one that fits
    reader = data_set(tmp_path_factory.mktemp("d") / "d", [size for pair in sizes for size in pair])
    samples = pairs(reader)
    expected = [
        (reader.read_sequence(i).tolist(), reader.read_sequence(i + 1).tolist())
        for i in range(0, len(reader), 2)
        if reader.lengths[i] + reader.lengths[i + 1] <= S
    ]
    found = []
    for k in range(int(samples.samples_per_epoch)):
        sample = samples[k]
        assert sample.document_ids is not None
        documents = []
        for number in range(sample.document_ids.max() + 1):
            own = sample.document_ids == number
            assert sample.position_ids[own].tolist() == list(range(own.sum()))
            if not sample.loss_weights[own].any():
                assert number == sample.document_ids.max()  # what is left of the sample
                continue
            assert sample.loss_weights[own].tolist() == [*(1 + sample.labels[own][:-1] % 2).tolist(), 0]
            assert sample.labels[own][:-1].tolist() == sample.tokens[own][1:].tolist()
            documents.append(sample.tokens[own].tolist())
        assert len(documents) % 2 == 0
        found += list(zip(documents[::2], documents[1::2], strict=True))
    assert sorted(found) == sorted(expected)


def test_what_has_no_room_is_counted_and_nothing_at_all_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = data_set(tmp_path / "d", [5, 9, 30, 30])
    with caplog.at_level("INFO"):
        assert pairs(reader).samples_per_epoch == 1
    assert "1 of 2 pairs exceed seq_length = 32 and are left out" in caplog.text
    with pytest.raises(DataError, match=r"none of its 2 pairs fits into data.seq_length = 8"):
        pairs(reader, seq_length=8)[0]


def test_a_split_cuts_no_pair(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="what renders templates")
    train_tokenizer(["the cat sat on the mat\n"], 270, tmp_path / "base")
    tokenizer = chat_tokenizer(tmp_path / "base", tmp_path / "tok", "qwen", marks=True)
    records = [{"prompt": "Hi", "chosen": "cat " * i, "rejected": "mat"} for i in range(1, 4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    preprocess_corpus([tmp_path / "p.jsonl"], tokenizer, tmp_path / "p", chat=ChatOptions(kind="pairs"))
    config = DataConfig.parse({"train": str(tmp_path / "p"), "split": [1, 1], "seq_length": 256, "kind": "pairs"})
    cut, rest, _ = build_blended_datasets(config, seed=1, samples={"train": 1, "valid": 1}, eod=None)
    assert rest is not None
    shown = [[part.name for part in split_sample_for_display(data[0], None)] for data in (cut, rest)]
    assert sorted(map(len, shown)) == [3, 5]  # with what is left of the sample; by sequences it would be three each


def test_documents_that_are_no_pairs_are_refused(tmp_path: Path) -> None:
    reader = data_set(tmp_path / "d", [5, 9])
    for path in (tmp_path / "e", get_loss_mask_prefix(tmp_path / "e")):
        with IndexedWriter(path, "uint8") as writer:
            writer.add_documents(np.arange(12) % 2, [4, 8])
    with pytest.raises(DataError, match=r"data.kind = pairs requires documents of two sequences"):
        pairs(IndexedReader(tmp_path / "e"))[0]
    with pytest.raises(ConfigError, match=r"kind pairs is not supported with data.order = megatron"):
        pairs(reader, order="megatron")
