"""muP: the change of activations over widths, and the best learning rate of each width, with muP and without.

    python benchmarks/mup.py [--steps 40] [--jobs 2]

A byte-level model of two layers reads the source and documents of this repository, at widths 64 to 512 and at learning
rates a factor of two apart. The best rate is the one with the lowest mean loss over the last tenth of the steps. The
coordinate check is that of `mega verify --mup`.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import record
import torch
from fp8_training import write_text

from mega_common.errors import MegaError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.pages.run_log import RunLog
from mega_trainer.run.training_run import run_training
from mega_trainer.verify.coordinate_check import check_coordinates

WIDTHS = (64, 128, 256, 512)
BASE_WIDTH = 64
RATES = [2.0**power for power in range(-11, -4)]


def settings(text: Path, output: Path, steps: int, width: int, rate: float, *, mup: bool) -> RunConfig:
    raw: dict[str, Any] = {
        "model": {
            "num_layers": 2, "hidden_size": width, "ffn_hidden_size": 2 * width, "num_attention_heads": width // 16,
            "vocab_size": 256, "max_position": 32,
        },
        "data": {"train": str(text), "seq_length": 32, "split": [1, 0, 0]},
        "batch": {"micro": 2, "global": 2},
        "optimizer": {"lr": rate, "weight_decay": 0.0, **({"mup": {"base_width": BASE_WIDTH}} if mup else {})},
        "lr_schedule": {"name": "constant", "warmup_steps": steps // 10},
        "train": {"steps": steps},
        "checkpoint": {"save": False},
        "log": {"tensorboard": False},
        "precision": "fp32",
        "device": "cpu",
        "output": str(output),
    }  # fmt: skip
    return RunConfig.parse(resolve_run_config(raw))


def last_loss(config: RunConfig) -> float:
    """Train, and return the mean loss over the last tenth of the steps; infinity if it diverges."""
    torch.set_num_threads(1)
    try:
        run_training(config, RankInfo(0, 1))
    except MegaError:
        return float("inf")
    points = RunLog.read_folder(Path(config.output)).metric_points("loss")
    last = [value for _, value in points[-max(1, len(points) // 10) :]]
    return sum(last) / len(last)


def measure() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    results: dict[str, Any] = {"steps": options.steps, "base_width": BASE_WIDTH, "learning_rates": RATES}
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        folder = Path(name)
        text = write_text(folder)
        cases = [(mup, width, rate) for mup in (True, False) for width in reversed(WIDTHS) for rate in RATES]
        runs = {
            case: pool.submit(
                last_loss, settings(text, folder / f"run-{number}", options.steps, *case[1:], mup=case[0])
            )
            for number, case in enumerate(cases)
        }
        first = settings(text, folder / "check", options.steps, BASE_WIDTH, 2.0**-8, mup=True)
        results["coordinates"] = check_coordinates(first, WIDTHS).as_json()
        for mup in (True, False):
            found: dict[str, Any] = {}
            for width in WIDTHS:
                losses = [runs[mup, width, rate].result() for rate in RATES]
                best = min(range(len(RATES)), key=losses.__getitem__)
                found[str(width)] = {"losses": losses, "best_learning_rate": RATES[best], "loss": losses[best]}
                print(mup, width, found[str(width)], flush=True)
            results["mup" if mup else "standard"] = found
    print(record.write("mup", results, ["torch"]))


if __name__ == "__main__":
    measure()
