"""The tokenizer `my_extension`: texts and their tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_trainer.extend import load_extensions

TOKENIZER = (
    load_extensions([str(Path(__file__).parent / "my_extension.py")]).entries("tokenizers")["my_extension"].build()
)


@pytest.mark.parametrize("text", ["", "if x:\n        return 1", " " * 40, "<end> byte 3 ä 漢"])
def test_the_tokens_of_a_text_spell_it(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert TOKENIZER.decode(tokens) == text
    assert TOKENIZER.vocabulary[TOKENIZER.end_token] not in tokens


def test_any_token_is_decoded() -> None:
    assert all(isinstance(TOKENIZER.decode([token]), str) for token in TOKENIZER.vocabulary.values())


def test_spaces_are_one_token() -> None:
    assert len(TOKENIZER.encode("a" + " " * 16 + "b")) == 3
