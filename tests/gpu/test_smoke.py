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
from mega_trainer.kernels import gemm_accumulation
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.kernels.torch_kernels import TorchKernels
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


@pytest.mark.parametrize("counts", [[3, 0, 13, 8], [0, 0, 0, 0], [5, 7, 1, 0]])
def test_grouped_products_are_those_of_a_loop(counts: list[int]) -> None:
    """Torch's one kernel for all groups, which is for bf16, against a product for each in fp32."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(counts), 32), (sum(counts), 48), (len(counts), 48, 32)]
    x, y, weight = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    rows, kernels = GroupedRows.from_counts(counts, x.device), TorchKernels()
    for function, tensors in ((kernels.grouped_linear, (x, weight)), (kernels.grouped_wgrad, (y, x))):
        fused = function(*(tensor.bfloat16() for tensor in tensors), rows)
        alone = function(*(tensor.bfloat16().float() for tensor in tensors), rows)
        torch.testing.assert_close(fused.float(), alone, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("add", [False, True])
def test_gradients_are_added_in_fp32(add: bool) -> None:
    """Of bf16 products and rows, without rounding them first."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b, rows, there = (
        torch.randn(shape, generator=generator, device="cuda") for shape in [(48, 64), (64, 32), (40, 32), (48, 32)]
    )
    a, b, rows = a.bfloat16(), b.bfloat16(), rows.bfloat16()
    places = torch.randint(0, 48, (40,), generator=generator, device="cuda")
    one_hot = torch.nn.functional.one_hot(places, 48).double()
    kept = there.double() if add else 0
    for function, factors, exact in (
        (gemm_accumulation.gemm_into, (a, b), a.double() @ b.double()), (gemm_accumulation.write_embedding_grad, (rows, places), one_hot.t() @ rows.double()),
    ):  # fmt: skip
        out = function(*factors, there.clone(), add=add)
        torch.testing.assert_close(out.double(), exact + kept, rtol=1e-5, atol=1e-4)
