"""Preference pairs to train on, and two models that disagree about them, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from mega_data.token_files.dataset_info import UNPAIRED, ChatInfo, write_dataset_info
from mega_data.token_files.indexed_reader import get_loss_mask_prefix
from mega_data.token_files.indexed_writer import IndexedWriter

VOCABULARY, LENGTH = 32, 48
Answer = tuple[list[int], int]  # tokens, of which so many are the question


def pairs(count: int, seed: int = 0) -> list[tuple[Answer, Answer]]:
    """Chosen and rejected answers to a question each, of a few tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        question = rng.integers(0, VOCABULARY, rng.integers(1, 5)).tolist()
        answers = [rng.integers(0, VOCABULARY, rng.integers(1, 9)).tolist() for _ in range(2)]
        made.append(tuple((question + answer, len(question)) for answer in answers))
    return made  # type: ignore[return-value]


def rated(count: int, seed: int = 0) -> list[tuple[Answer, Answer]]:
    """Pairs of which most miss an answer: two tokens of the question stand in its place."""
    made = pairs(count, seed)
    for number, (chosen, rejected) in enumerate(made):
        empty = (chosen[0][: min(chosen[1], 2)], min(chosen[1], 2))
        made[number] = [(chosen, empty), (empty, rejected), (chosen, empty), (chosen, rejected)][number % 4]
    return made


def write_pairs(prefix: Path, made: list[tuple[Answer, Answer]]) -> None:
    """As `mega data preprocess --kind pairs` makes them; a mask of zeros and ones."""
    for path, dtype in ((prefix, "uint16"), (get_loss_mask_prefix(prefix), "uint8")):
        with IndexedWriter(path, dtype) as writer:
            for pair in made:
                rows = [
                    np.array(tokens) if path == prefix else np.arange(len(tokens)) >= asked for tokens, asked in pair
                ]
                writer.write_tokens(np.concatenate(rows).astype(dtype))
                writer.end_documents([len(row) for row in rows], [2])
    tokens = sum(len(tokens) for pair in made for tokens, _ in pair)
    missing = sum(len(tokens) == asked for pair in made for tokens, asked in pair)
    chat = ChatInfo(
        kind="pairs", loss_on="answers", one=1, template="", marked=True, notes={UNPAIRED: missing} if missing else {}
    )
    write_dataset_info(
        prefix, tokenizer=None, append_eod=False, dtype="uint16", documents=len(made), tokens=tokens, text_bytes=0,
        bin_sha256="", chat=chat,
    )  # fmt: skip


def write_model(folder: Path, seed: int, kind: str = "LlamaForCausalLM", **settings: Any) -> None:
    """A tiny model in fp64, as transformers has it."""
    import transformers

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    rest = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3}
    config = transformers.LlamaConfig(**{**sizes, **heads, **rest, **settings})
    getattr(transformers, kind)(config).double().save_pretrained(folder)
