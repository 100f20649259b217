from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_data.token_files.indexed_writer import IndexedWriter

MODEL = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "max_position": 64,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A small run on learnable tokens, to be changed section by section: settings(train={"steps": 3}, ...)."""
    rng = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "tokens", np.dtype(np.uint16)) as writer:
        for _ in range(60):
            start = rng.integers(0, 40)
            writer.add_document(np.arange(start, start + rng.integers(5, 60)).astype(np.uint16) % 40)

    def make(**sections: Any) -> dict[str, Any]:
        base: dict[str, Any] = {
            "model": MODEL,
            "data": {"train": str(tmp_path / "tokens"), "seq_length": 16, "split": [9, 1, 0]},
            "batch": {"micro": 2, "global": 4},
            "train": {"steps": 6},
            "optimizer": {"lr": 1e-2},
            "precision": "fp32",
            "checkpoint": {"async": False},
            "log": {"tensorboard": False},
            "device": "cpu",
            "output": str(tmp_path / "run"),
        }
        for name, value in sections.items():
            base[name] = {**base[name], **value} if isinstance(value, dict) and name in base else value
        return base

    return make
