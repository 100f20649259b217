from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mega_data.tokenizer import train_tokenizer

CORPUS = ["the cat sat on the mat\n", "def f(x):\n    return x + 1\n", "the dog and the cat, naïve café\n"] * 20


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 300 tokens; 0 is <|endoftext|>."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(CORPUS, 300, folder)
    return folder


@pytest.fixture
def store() -> Iterator[Any]:
    """An empty object store in memory."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()
