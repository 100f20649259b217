from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_common.errors import DataError
from mega_data.config import DataConfig
from mega_data.preprocess import preprocess
from mega_data.tokenizer import train_tokenizer
from mega_trainer.tokens import run_tokenizer, tokenizer_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tokenizers, `one` and `two`, and a data set of each."""
    for name, text in (("one", "to be or not to be " * 20), ("two", "all work and no play " * 20)):
        train_tokenizer([text], 300, tmp_path / name)
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}) + "\n")
        preprocess([tmp_path / f"{name}.jsonl"], tmp_path / name, tmp_path / f"{name}-tokens", append_eod=True)
    return tmp_path


def config(folder: Path, *names: str, tokenizer: str | None = None) -> DataConfig:
    train = [{"path": str(folder / f"{name}-tokens")} for name in names]
    return DataConfig.parse({"train": train, "tokenizer": str(folder / tokenizer) if tokenizer else None})


def test_the_tokenizer_of_the_data_is_found(folder: Path) -> None:
    found = run_tokenizer(config(folder, "one"), 300)
    assert found is not None
    assert found.eos_id is not None
    assert {path.name for path in tokenizer_files(found)} == {"tokenizer.json", "tokenizer_config.json"}


def test_data_of_two_tokenizers_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"two-tokens.info: made with another tokenizer"):
        run_tokenizer(config(folder, "one", "two"), 300)


def test_another_tokenizer_than_the_named_one_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"one-tokens.info: made with another tokenizer .* than data.tokenizer"):
        run_tokenizer(config(folder, "one", tokenizer="two"), 300)


def test_a_vocabulary_that_is_too_small_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"set model\.vocab_size="):
        run_tokenizer(config(folder, "one"), 100)
