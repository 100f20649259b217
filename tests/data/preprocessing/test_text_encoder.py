from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_common.errors import DataError, MissingPackageError
from mega_data.preprocessing import text_encoder as module
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.preprocessing.text_encoder import ComparedFastEncoder, EncoderMismatch, choose_text_encoder
from mega_data.tokenizer import Tokenizer

TEXTS = ["the cat sat", "", "naïve café\n\n  x", "<|endoftext|> 日本語 123456", "the mat" * 50]


class Liar:
    """In place of a `fastokens.Tokenizer`: what `tokenizers` says, but of texts with the word `lie`."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder, specials_as_text=True)
        self.calls = 0

    def encode_batch_flat(self, texts: list[str], *_: bool) -> tuple[bytes, bytes]:
        self.calls += 1
        arrays = [self.tokenizer.encode_batch([text], "<u4")[0] + ("lie" in text) for text in texts]
        bounds = np.cumsum([0, *(array.size for array in arrays)])
        return np.concatenate(arrays).tobytes(), bounds.astype("<u8").tobytes()


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path) -> Liar:
    made = Liar(tokenizer_folder)
    monkeypatch.setattr(module, "_open", lambda _: made)
    monkeypatch.setattr(module, "version", lambda _: "0")
    monkeypatch.setattr(module, "COMPARED_FIRST", 40)
    monkeypatch.setattr(module, "COMPARED_PART", 10)
    monkeypatch.setattr("mega_data.preprocessing.text_batches.BATCH", 60)
    return made


def corpus(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def read_dataset_bytes(prefix: Path) -> tuple[bytes, bytes]:
    return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()


def test_fastokens_makes_the_same_tokens(tokenizer_folder: Path) -> None:
    for as_text in (True, False):
        tokenizer = Tokenizer(tokenizer_folder, specials_as_text=as_text)
        fast = choose_text_encoder("fastokens", tokenizer, 0, rereadable=False)
        assert isinstance(fast, ComparedFastEncoder)
        fast.compared = 1 << 30  # what follows is not compared there
        for ours, theirs in zip(fast.encode_batch(TEXTS, "<u2"), tokenizer.encode_batch(TEXTS, "<u2"), strict=True):
            assert ours.dtype == theirs.dtype
            assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize(
    ("size", "again", "fast"), [(1 << 24, True, True), (1 << 20, True, False), (1 << 24, False, False)]
)
def test_auto_is_fast_where_it_pays_and_can_be_undone(
    tokenizer_folder: Path, size: int, again: bool, fast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tokenizer = Tokenizer(tokenizer_folder)
    chosen = choose_text_encoder("auto", tokenizer, size, rereadable=again)
    assert isinstance(chosen, ComparedFastEncoder) == fast
    assert choose_text_encoder("tokenizers", tokenizer, size, rereadable=again) is tokenizer
    assert [record.message.split(" ")[0] for record in caplog.records] == ["encoder:"] * fast


def test_a_tokenizer_that_fastokens_does_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    caplog.set_level(logging.INFO)
    Backend(models.Unigram([("a", 0.0), ("b", -1.0)], 0)).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert choose_text_encoder("auto", tokenizer, 1 << 30, rereadable=True) is tokenizer
    assert "is not supported by fastokens" in caplog.text
    with pytest.raises(DataError, match="is not supported by fastokens"):
        choose_text_encoder("fastokens", tokenizer, 0, rereadable=True)


def test_fastokens_is_asked_for_and_missing(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    with pytest.raises(MissingPackageError, match="requires the package fastokens"):
        choose_text_encoder("fastokens", Tokenizer(tokenizer_folder), 0, rereadable=True)


def test_a_part_is_compared(tokenizer_folder: Path, liar: Liar) -> None:
    fast = ComparedFastEncoder(Tokenizer(tokenizer_folder), liar)
    fast.encode_batch(["x" * 50, "not compared: lie"], np.int32)
    assert (fast.encoded, fast.compared) == (67, 50)
    fast.encode_batch(["x" * 20], np.int32)
    assert fast.compared == 50  # 40 and a tenth of 87 is less
    with pytest.raises(EncoderMismatch) as raised:
        fast.encode_batch(["x" * 22, "lie", "lie"], np.int32)
    assert (raised.value.index, fast.compared) == (1, 53)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_difference_starts_over_without_it(
    tmp_path: Path, tokenizer_folder: Path, liar: Liar, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["x" * 50, "lie, and nobody looks", *["the cat sat " * 20] * 20, *["lie " * 40] * 20]
    source = corpus(tmp_path / "a.jsonl", texts)
    preprocess_corpus([source], tokenizer_folder, tmp_path / "true", encoder="tokenizers")
    assert not liar.calls
    preprocess_corpus([source], tokenizer_folder, tmp_path / "fast", encoder="fastokens", workers=workers)
    assert liar.calls
    assert read_dataset_bytes(tmp_path / "fast") == read_dataset_bytes(tmp_path / "true")
    assert sum("fastokens and tokenizers differ" in record.message for record in caplog.records) == 1
    assert not list(tmp_path.glob(".fast*"))


def test_what_was_given_up_stays_so_after_a_kill(
    tmp_path: Path, tokenizer_folder: Path, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORTHWHILE", 0)
    monkeypatch.setattr("mega_data.preprocessing.dataset_output.RECORD_INTERVAL", 0.0)
    source = corpus(tmp_path / "a.jsonl", ["lie " * 20, *["the cat sat " * 20] * 20])
    real, calls = Tokenizer.encode_batch, 0

    def killed(tokenizer: Tokenizer, texts: list[str], dtype: Any = np.int32) -> Any:
        nonlocal calls
        calls += 1
        if calls > 9:  # the first one compares spellings
            raise KeyboardInterrupt
        return real(tokenizer, texts, dtype)

    monkeypatch.setattr(Tokenizer, "encode_batch", killed)
    with pytest.raises(BaseException):  # noqa: B017 - whatever a kill becomes
        preprocess_corpus([source], tokenizer_folder, tmp_path / "out", workers=1)
    monkeypatch.setattr(Tokenizer, "encode_batch", real)
    liar.calls = 0
    preprocess_corpus([source], tokenizer_folder, tmp_path / "out", workers=1)
    assert not liar.calls
    preprocess_corpus([source], tokenizer_folder, tmp_path / "true", encoder="tokenizers")
    assert read_dataset_bytes(tmp_path / "out") == read_dataset_bytes(tmp_path / "true")


def test_what_cannot_be_read_again_cannot_start_over(
    tmp_path: Path, tokenizer_folder: Path, liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = corpus(tmp_path / "a.jsonl", ["lie " * 20])
    with open(source) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(DataError, match=r"-:1: fastokens and tokenizers differ .* cannot be read again") as raised:
            preprocess_corpus(["-"], tokenizer_folder, tmp_path / "out", encoder="fastokens")
    assert raised.value.hint == "use --encoder tokenizers"
    assert not (tmp_path / "out.idx").exists()
