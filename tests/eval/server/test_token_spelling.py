from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.server.token_spelling import Vocabulary


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(["the end of the story"] * 3, 270, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def vocabulary(byte_level: Tokenizer) -> Vocabulary:
    return Vocabulary(byte_level)


@settings(max_examples=40)
@given(st.text())
def test_bytes_of_tokens_are_those_of_the_text(byte_level: Tokenizer, vocabulary: Vocabulary, text: str) -> None:
    told = [vocabulary[token] for token in byte_level.encode(text)]
    assert b"".join(one.raw for one in told).decode() == text
    assert all(one.text is None or one.text.encode() == one.raw for one in told)


def test_parts_of_characters_are_spelt_as_bytes(byte_level: Tokenizer, vocabulary: Vocabulary) -> None:
    found = [vocabulary[token] for token in byte_level.encode("é")]
    assert [one.completion_spelling for one in found] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert [one.chat_spelling for one in found] == ["\\xc3", "\\xa9"]
    assert [one.raw for one in found] == [b"\xc3", b"\xa9"]


def test_spaces_and_bytes_of_sentencepiece(tmp_path: Path) -> None:
    """As Llama-2's tokenizer.json has them: a space is `▁`, and the first of a text is dropped."""
    words = ["<unk>", "<0xC3>", "<0xA9>", "▁", "a", "▁a"]
    backend = Backend(models.BPE({word: at for at, word in enumerate(words)}, [("▁", "a")], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    vocabulary = Vocabulary(Tokenizer(tmp_path))
    assert [(vocabulary[token].completion_spelling, vocabulary[token].raw) for token in (1, 2, 4, 5)] == [
        ("bytes:\\xc3", b"\xc3"), ("bytes:\\xa9", b"\xa9"), ("a", b"a"), (" a", b" a"),
    ]  # fmt: skip
