"""The same code on a CUDA device. Skipped where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mega_ckpt.store import Checkpoint, latest
from mega_data.indexed import IndexedWriter
from mega_trainer.config import RunConfig
from mega_trainer.ranks import Ranks
from mega_trainer.train import run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_trains_saves_and_resumes_on_a_gpu(tmp_path: Path, precision: str, recompute: str) -> None:
    with IndexedWriter(tmp_path / "tokens", np.dtype(np.uint16)) as writer:
        for start in range(50):
            writer.add_document(np.arange(start, start + 200).astype(np.uint16) % 500)
    raw = {
        "model": {
            "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "num_kv_heads": 2,
            "vocab_size": 500, "residual_dropout": 0.1,
        },
        "data": {"train": str(tmp_path / "tokens"), "seq_length": 128},
        "batch": {"micro": 4, "global": 8},
        "optimizer": {"lr": 3e-3},
        "lr_schedule": {"decay_steps": 40},
        "precision": precision,
        "recompute": {"kind": recompute},
        "log": {"tensorboard": False},
        "device": "cuda",
        "output": str(tmp_path / "run"),
    }  # fmt: skip
    for steps in (20, 40):
        run(RunConfig.parse({**raw, "train": {"steps": steps}}), Ranks())
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 40
    assert losses[-1] < 0.7 * losses[0]
    saved = latest(tmp_path / "run/checkpoints")
    assert saved is not None
    assert Checkpoint.open(saved).step == 40
