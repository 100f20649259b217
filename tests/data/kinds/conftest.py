"""A WordPiece tokenizer, as mega and as Megatron know it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from masked_data import SENTINELS, SPECIAL, WORDS
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from mega_data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def word_pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A WordPiece tokenizer with the special tokens of BERT and T5, 207 tokens in all."""
    folder = tmp_path_factory.mktemp("word_pieces")
    vocab = {token: i for i, token in enumerate(SPECIAL + WORDS + SENTINELS)}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL + SENTINELS)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[EOS]"}))
    return Tokenizer(folder)


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
