"""Data sets of sentences, and Megatron's own data sets to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[BOS]", "[EOS]"]
WORDS = [f"w{i}" for i in range(60)] + [f"##p{i}" for i in range(40)]
SENTINELS = [f"<extra_id_{i}>" for i in range(100)]


def word_piece_tokenizer(folder: Path) -> Tokenizer:
    """See `save_word_pieces`."""
    return Tokenizer(save_word_pieces(folder))


def save_word_pieces(folder: Path, *, around: bool = False) -> Path:
    """A WordPiece tokenizer with the special tokens of BERT and T5, 207 tokens in all; `around` a text go [CLS] and [SEP]."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate(SPECIAL + WORDS + SENTINELS)}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL + SENTINELS)
    if around:
        ends = [(name, vocab[name]) for name in ("[CLS]", "[SEP]")]
        backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[EOS]"}))
    return folder


def sentences(prefix: Path, seed: int, *, documents: int = 30, most: int = 12, longest: int = 40) -> Path:
    """Documents of 0 to `most` sentences of 1 to `longest` word pieces; now and then one of 600."""
    random = np.random.default_rng(seed)
    counts = random.integers(0, most + 1, documents)
    lengths = random.integers(1, longest + 1, counts.sum())
    lengths[random.random(lengths.size) < 0.01] = 600
    tokens = random.integers(len(SPECIAL), len(SPECIAL + WORDS), lengths.sum())
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_documents(tokens, lengths, sequences=counts)
    return prefix


def their_splits(kind: type, config: Any, sizes: list[int]) -> list[Any]:
    """Train, valid and test of one of Megatron's kinds of data set."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    return list(BlendedMegatronDatasetBuilder(kind, tuple(sizes), lambda: True, config).build())
