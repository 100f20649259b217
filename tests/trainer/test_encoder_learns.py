"""A small ModernBERT, trained on this Python's own source code: it guesses masked tokens, and its vectors find neighbors."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from mega_ckpt.source import open_weight_source
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer
from mega_eval.encoder_losses import evaluate_masked_lm
from mega_eval.model_loading import load_inference_model
from mega_eval.text_embedding import compute_embeddings
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run.training_run import run_training

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
S, SIZE = 128, 2000
MODEL: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 192, "num_attention_heads": 4, "vocab_size": SIZE, "max_position": S,
    "causal": False, "norm": "layernorm", "norm_bias": False, "embedding_norm": True, "first_norm": False,
    "activation": "geglu_erf", "tie_embeddings": True, "masked_lm": {"dense_bias": False}, "sliding_window": 17,
    "full_attention_layers": [0, 3], "rope": {"theta": 160_000.0}, "local_rope": {"theta": 10_000.0},
}  # fmt: skip


def sources() -> list[str]:
    """The modules of the standard library, in a fixed order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py"))]


def tokenizer_of(texts: list[str], folder: Path) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=SIZE, special_tokens=["[PAD]", "[MASK]", "[EOD]"])
    )
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "[EOD]"}')
    return Tokenizer(folder)


def write(prefix: Path, texts: list[list[int]]) -> None:
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_documents(np.concatenate([np.array(text) for text in texts]), [len(text) for text in texts])


def test_a_modernbert_trained_on_code_beats_unigrams_and_finds_a_planted_neighbor(tmp_path: Path) -> None:
    texts = sources()
    tokenizer = tokenizer_of(texts[::4], tmp_path / "tok")
    eod = tokenizer.eos_id
    assert eod is not None
    told = [[*tokenizer.encode(text), eod] for text in texts]
    held_out, training = told[::10], [text for number, text in enumerate(told) if number % 10]
    write(tmp_path / "train", training)
    write(tmp_path / "held-out", [text[:1000] for text in held_out])
    settings = {
        "model": MODEL, "data": {
            "train": str(tmp_path / "train"), "split": [1], "kind": "masked", "seq_length": S, "tokenizer": str(tmp_path / "tok"),
            "bert": {"mask_probability": 0.3}, "reset_attention_mask": True, "reset_position_ids": True,
        },
        "batch": {"micro": 32, "global": 32}, "train": {"steps": 500}, "precision": "fp32", "output": str(tmp_path / "out"),
        "optimizer": {"lr": 3e-3}, "lr_schedule": {"name": "cosine", "warmup_steps": 40, "min_lr": 3e-4},
    }  # fmt: skip
    run_training(RunConfig.parse(settings), RankInfo(0, 1))
    model = load_inference_model(tmp_path / "out", kinds=("encoder",))
    assert open_weight_source(tmp_path / "out").model.masked_lm is not None
    found = evaluate_masked_lm(model, tmp_path / "held-out", S, tokenizer, batch_size=32)
    assert found.loss < unigrams(training, tmp_path / "held-out", eod) - 1.0

    places = [
        np.array(text[start : start + 100]) for text in held_out for start in (0, 300, 600) if len(text) > start + 100
    ]
    rng = np.random.default_rng(0)
    planted = [
        part[np.sort(rng.permutation(part.size)[: part.size * 2 // 3])] for part in places
    ]  # a third of it left out
    vectors, queries = (
        torch.from_numpy(compute_embeddings(model, [part.tolist() for part in parts], normalize=True))
        for parts in (places, planted)
    )
    nearest = (queries @ vectors.T).argmax(1)
    assert len(places) > 40
    assert (nearest == torch.arange(len(places))).float().mean() > 0.9


def unigrams(training: list[list[int]], prefix: Path, eod: int) -> float:
    """The loss of who guesses by how often each token was seen, on the tokens that are to be guessed."""
    counts = np.bincount(np.concatenate(training), minlength=SIZE) + 1.0
    tokens = np.fromfile(prefix.with_suffix(".bin"), np.uint16)
    return float(-np.log(counts / counts.sum())[tokens[tokens != eod]].mean()) if tokens.size else math.inf
