"""A WordPiece tokenizer, as mega and as Megatron know it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from masked_data import SENTINELS, word_piece_tokenizer

from mega_data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def word_pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """See `word_piece_tokenizer`."""
    return word_piece_tokenizer(tmp_path_factory.mktemp("word_pieces"))


@pytest.fixture(scope="session")
def their_tokenizer(word_pieces: Tokenizer) -> Any:
    """The same as Megatron's data sets ask for it."""
    vocab = word_pieces.backend.get_vocab()
    return SimpleNamespace(
        cls=vocab["[CLS]"], sep=vocab["[SEP]"], mask=vocab["[MASK]"], pad=vocab["[PAD]"],
        bos=vocab["[BOS]"], eos=vocab["[EOS]"], eod=vocab["[EOS]"],
        inv_vocab={i: token for token, i in sorted(vocab.items(), key=lambda pair: pair[1])},
        additional_special_tokens_ids=[vocab[name] for name in SENTINELS],
        unique_identifiers={"class": "none"},
    )  # fmt: skip


@pytest.fixture(scope="session")
def megatron() -> Iterator[None]:
    """Megatron's data sets, where it is installed; they ask for a process group."""
    pytest.importorskip("megatron.core.datasets", reason="the oracle is not installed")
    distributed = pytest.importorskip("torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
