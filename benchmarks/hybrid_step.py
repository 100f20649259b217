"""Training steps of small hybrids on a CPU against transformers': the same model, batch, precision (fp32) and threads.

    python benchmarks/hybrid_step.py [--rounds 5] [--threads 2] [--processor-time] [--dry]

Bamba has Mamba-2 and attention, Qwen3.5 gated delta nets and gated attention, each with an MLP in every layer. The models
are made by transformers, which has neither of the kernels for a GPU here, and read from its folders; steps take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import record
import torch
import transformers
from train_step import ours, seconds, spread, tokens

from mega_trainer.config import RunConfig, resolve

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
    return RunConfig.parse(resolve({**run, "model": {"from": folder}}))


def theirs(model: torch.nn.Module, config: RunConfig) -> Callable[[], object]:
    """A step by transformers' own loss, torch's clipping and its fused AdamW."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.from_numpy(tokens(config)[:, :-1].copy())

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def compare(hf: Any, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Tokens per second of both, and the ratio of the pairs."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = settings(folder)
    mine, other = ours(config), theirs(model, config)
    mine(), other()
    times = [(seconds(mine, clock=clock), seconds(other, clock=clock)) for _ in range(rounds)]
    rate = {
        name: round(ROWS * LENGTH / statistics.median(column))
        for name, column in zip(("mega", "transformers"), zip(*times, strict=True), strict=True)
    }
    return {"tokens_per_second": rate, "speed_over_transformers": spread([b / a for a, b in times])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="time the processors' work, not the wall's clock")
    parser.add_argument("--dry", action="store_true", help="write no result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = process_time if options.processor_time else perf_counter
    results = {name: compare(hf, options.rounds, clock) for name, hf in MODELS.items()}
    for name, result in results.items():
        print(name, result)
    if not options.dry:
        print("written to", record.write("hybrid_step", results, ["torch", "transformers"]))


if __name__ == "__main__":
    main()
