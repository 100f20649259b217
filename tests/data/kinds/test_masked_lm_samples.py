"""Running text with masked tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_common.errors import DataError
from mega_data.batch_loader import BatchLoader
from mega_data.blended_dataset import BlendedDataset, build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer

CLS, SEP, MASK, EOS = 2, 3, 4, 6


def masked_dataset(
    tokenizer: Tokenizer, prefix: Path, seed: int = 1, eod: int | None = EOS, **fields: Any
) -> BlendedDataset:
    raw = {"train": str(prefix), "split": [1], "seq_length": 64, "kind": "masked", **fields}
    config = DataConfig.parse({**raw, "bert": {"mask_probability": 0.3}})
    return build_blended_datasets(config, seed=seed, samples={"train": 1}, eod=eod, tokenizer=tokenizer)[0]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Documents of 39 tokens, each from 20 on but its first, [CLS], and its last, which ends it."""
    rng = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "d", "uint16") as writer:
        tokens = rng.integers(20, 200, (100, 39))
        tokens[:, 0], tokens[:, -1] = CLS, EOS
        writer.add_documents(tokens.ravel(), np.full(100, 39))
    return tmp_path / "d"


def test_samples_are_windows_of_which_some_tokens_are_to_be_guessed(text: Path, word_pieces: Tokenizer) -> None:
    data = masked_dataset(word_pieces, text, reset_attention_mask=True, reset_position_ids=True)
    samples = [data[k] for k in range(300)]
    tokens, labels, weights = (
        np.stack([getattr(s, key) for s in samples]) for key in ("tokens", "labels", "loss_weights")
    )
    guessed = weights > 0
    assert not np.isin(labels[guessed], [CLS, EOS]).any()
    assert np.array_equal(tokens[~guessed], labels[~guessed])
    assert guessed.mean() == pytest.approx(0.3 * 37 / 39, abs=0.01)
    assert np.mean(tokens[guessed] == MASK) == pytest.approx(0.8, abs=0.02)
    assert np.mean(tokens[guessed] == labels[guessed]) == pytest.approx(0.1, abs=0.02)
    assert samples[0].document_ids is not None
    assert samples[0].document_ids.max() >= 1
    assert max(sample.position_ids.max() for sample in samples) == 38


def test_a_sample_depends_on_seed_and_number_alone(text: Path, word_pieces: Tokenizer) -> None:
    first, again, other = (masked_dataset(word_pieces, text, seed) for seed in (1, 1, 2))
    assert [first[k].tokens.tolist() for k in range(20)] == [again[k].tokens.tolist() for k in range(19, -1, -1)][::-1]
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_batches_have_neither_segments_nor_pairs(text: Path, word_pieces: Tokenizer) -> None:
    batch = next(iter(BatchLoader(masked_dataset(word_pieces, text), global_batch=4, seq_length=64)))
    assert (batch.token_types, batch.pair_labels, batch.document_ids) == (None, None, None)


def test_a_tokenizer_without_a_mask_is_refused(text: Path, tmp_path: Path, word_pieces: Tokenizer) -> None:
    (tmp_path / "tok").mkdir()
    content = word_pieces.path.read_text().replace("[MASK]", "[HIDE]")
    (tmp_path / "tok" / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=r"the special token \[MASK\] or <mask>"):
        masked_dataset(Tokenizer(tmp_path / "tok"), text)
