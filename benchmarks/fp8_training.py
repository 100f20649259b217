"""fp8 training: the loss of a small model on held-out text by each recipe, beside bf16.

    python benchmarks/fp8_training.py [--steps 200]

A byte-level model reads the source and documents of this repository. Each recipe trains it from the same start on the
same samples; bf16 does with two seeds, which shows how far runs lie apart that differ in chance alone. On a CPU the
numbers are those of a GPU but for the order of sums; speed is not measured here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch

from mega_data.token_files.indexed_writer import IndexedWriter
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run.training_run import run_training

ROOT = Path(__file__).parents[1]
SEEDS = (1, 2)
RUNS: dict[str, dict[str, Any]] = {
    f"bf16, seed {seed}": {"precision": "bf16", "train": {"seed": seed}} for seed in SEEDS
}
RUNS |= {
    name: {"precision": "fp8", "fp8": {"recipe": name}} for name in ("tensorwise", "rowwise", "blockwise", "mxfp8")
}


def write_text(folder: Path) -> Path:
    """The repository's text as bytes, a document a file."""
    with IndexedWriter(folder / "text", np.dtype(np.uint16)) as writer:
        for path in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("packages/**/*.py"), *ROOT.glob("cli/**/*.py")]):
            writer.add_document(np.frombuffer(path.read_bytes(), np.uint8).astype(np.uint16))
    return folder / "text"


def settings(text: Path, output: Path, steps: int, change: dict[str, Any]) -> RunConfig:
    return RunConfig.parse(
        {
            "model": {
                "num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 384, "num_attention_heads": 2,
                "vocab_size": 256, "max_position": 128,
            },
            "data": {"train": str(text), "seq_length": 128, "split": [95, 5, 0]},
            "batch": {"micro": 8, "global": 8},
            "optimizer": {"lr": 3e-3},
            "lr_schedule": {"warmup_steps": steps // 15},
            "checkpoint": {"async": False},
            "log": {"tensorboard": False},
            "device": "cpu",
            "output": str(output),
            **change,
            "train": {"steps": steps, "eval_every": steps, "eval_steps": 16, "seed": 1, **change.get("train", {})},
        }
    )  # fmt: skip


def losses(folder: Path) -> tuple[float, float]:
    """Of the last tenth of the training steps, and at the end on held-out text."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line["loss"] for line in lines if "loss" in line]
    return float(np.mean(train[-len(train) // 10 :])), next(
        line["valid_loss"] for line in lines if "valid_loss" in line
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        text = write_text(Path(scratch))
        for number, (name, change) in enumerate(RUNS.items()):
            folder = Path(scratch) / str(number)
            run_training(settings(text, folder, steps, change), RankInfo())
            train, valid = losses(folder)
            first = results.get("bf16, seed 1", {"valid": valid})
            results[name] = {"train": train, "valid": valid, "valid_less_bf16": valid - first["valid"]}
            record.write("fp8_training", {"steps": steps, "losses": results}, ["torch"])
            print(f"{name:14} train {train:.4f}  held out {valid:.4f}  {valid - first['valid']:+.4f}", flush=True)


if __name__ == "__main__":
    main()
