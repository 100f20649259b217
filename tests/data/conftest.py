from __future__ import annotations

from pathlib import Path

import pytest

from mega_data.tokenizer import train_tokenizer

CORPUS = ["the cat sat on the mat\n", "def f(x):\n    return x + 1\n", "the dog and the cat, naïve café\n"] * 20


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 300 tokens; 0 is <|endoftext|>."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(CORPUS, 300, folder)
    return folder
