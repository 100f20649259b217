"""Training steps of small hybrids on a CPU against transformers': the same model, batch, precision (fp32) and threads.

    python benchmarks/hybrid_step.py [--rounds 5] [--threads 2] [--processor-time] [--dry]

Bamba has Mamba-2 and attention, Qwen3.5 gated delta nets and gated attention, each with an MLP in every layer. The models
are made by transformers, which has neither of the kernels for a GPU here, and read from its folders. Each side has a process
of its own; they take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import bare_step
import record
import torch
import transformers
from sides import Side, spread, times_in_turn
from train_step import STEPS, bare, ours

from mega_trainer.config.run_config import RunConfig, resolve_run_config

ROWS, LENGTH = 4, 256
SHAPE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
MODELS = {
    "bamba": transformers.BambaConfig(
        **SHAPE, attn_layer_indices=[2], mamba_n_heads=16, mamba_d_head=32, mamba_d_state=64, mamba_chunk_size=64
    ),
    "qwen3.5": transformers.Qwen3_5TextConfig(
        **SHAPE, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
}  # fmt: skip


def settings(folder: str) -> RunConfig:
    """A run that trains the model in this folder."""
    run = {
        "data": {"train": "unused", "seq_length": LENGTH},
        "batch": {"micro": ROWS, "global": ROWS},
        "precision": "fp32",
    }
    return RunConfig.parse(resolve_run_config({**run, "model": {"from": folder}}))


def compare(hf: Any, rounds: int, threads: int, clock: str) -> dict[str, Any]:
    """Tokens per second of both, and the ratio of the pairs."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as given:
        transformers.AutoModelForCausalLM.from_config(hf).save_pretrained(folder)
        sides = {
            "mega": Side(__file__, "--serve", folder, str(threads)),
            "transformers": bare(settings(folder), hf.to_dict(), threads, Path(given)),
        }
        times = times_in_turn(sides, str(STEPS), rounds, clock)
    rate = {name: round(ROWS * LENGTH / statistics.median(values)) for name, values in times.items()}
    mine, other = times["mega"], times["transformers"]
    return {
        "tokens_per_second": rate,
        "speed_over_transformers": spread([b / a for a, b in zip(mine, other, strict=True)]),
    }


def serve(folder: str, threads: str) -> None:
    """Our side."""
    torch.set_num_threads(int(threads))
    bare_step.answer_calls(ours(settings(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="time the processors' work, not the wall's clock")
    parser.add_argument("--dry", action="store_true", help="write no result")
    options = parser.parse_args()
    clock = "processor" if options.processor_time else "wall"
    results = {name: compare(hf, options.rounds, options.threads, clock) for name, hf in MODELS.items()}
    for name, result in results.items():
        print(name, result)
    if not options.dry:
        print("written to", record.write("hybrid_step", results, ["torch", "transformers"]))


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1:2] == ["--serve"] else main()
