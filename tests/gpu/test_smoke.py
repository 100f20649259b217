"""The same code on a CUDA device. Skipped where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_ckpt.store import Checkpoint, latest_checkpoint
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run.training_run import run_training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


MODELS: dict[str, dict[str, Any]] = {
    "dense": {"num_kv_heads": 2, "residual_dropout": 0.1},
    "experts": {
        "mlp_bias": True, "attention_sinks": True, "sliding_window": 40, "mtp_layers": 1,
        "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 64, "shared_ffn_hidden_size": 64, "aux_loss": 0.01},
    },
    "latent": {
        "mla": {
            "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        },
        "moe": {"num_experts": 4, "top_k": 1, "ffn_hidden_size": 96, "score": "sigmoid", "selection_bias": True},
    },
}  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_trains_saves_and_resumes_on_a_gpu(tmp_path: Path, model: str, precision: str, recompute: str) -> None:
    with IndexedWriter(tmp_path / "tokens", np.dtype(np.uint16)) as writer:
        for start in range(50):
            writer.add_document(np.arange(start, start + 200).astype(np.uint16) % 500)
    raw = {
        "model": {
            "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "vocab_size": 500,
            **MODELS[model],
        },
        "data": {"train": str(tmp_path / "tokens"), "seq_length": 128},
        "batch": {"micro": 4, "global": 8},
        "optimizer": {"lr": 3e-3},
        "lr_schedule": {"decay_steps": 40},
        "precision": precision,
        "recompute": {"kind": recompute},
        "offload": {"activations": int(recompute == "selective"), "min_bytes": 0},
        "log": {"tensorboard": False},
        "device": "cuda",
        "output": str(tmp_path / "run"),
    }  # fmt: skip
    for steps in (20, 40):
        run_training(RunConfig.parse({**raw, "train": {"steps": steps}}), RankInfo())
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 40
    assert losses[-1] < 0.7 * losses[0]
    saved = latest_checkpoint(tmp_path / "run/checkpoints")
    assert saved is not None
    assert Checkpoint.open_folder(saved).step == 40
