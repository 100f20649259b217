"""Launches, host waits and device allocations of a training step, counted by the null GPU, and the recorded counts.

`make null-gpu-counts` records them anew: a change of the file is part of the change that causes it.
"""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from pathlib import Path

import torch
from parity import eight_bits
from parity.cases import MODELS, case

from mega_trainer.verify.case_trainer import CaseTrainer
from mega_trainer.verify.layout_case import LayoutCase

RECORDED = Path(__file__).with_name("counts.json")
KINDS = ("launches", "host waits", "device allocations", "copies to the host")  # by number, as null_gpu.c counts them
Counts = dict[str, dict[str, int]]


def cases() -> dict[str, LayoutCase]:
    """Every model in bf16, uncompiled, and a dense one in the other precisions, with recomputation and with CUDA graphs."""
    dense = {"precision": "bf16", "micro": 4}
    found = {name: case(name, 1, **dense) for name in MODELS}
    found |= {
        f"dense, {kind} recomputation": case("dense", 1, **dense, recompute={"kind": kind})
        for kind in ("selective", "full")
    }
    found |= {
        "dense, fp16": case("dense", 1, precision="fp16", micro=4),
        "dense, Muon": case("dense", 1, **dense, optimizer="muon"),
    }
    for graphs in ("off", "layers"):
        one = case("dense", 1, layers=8, precision="bf16", micro=1, closed=False, sections={"cuda_graphs": graphs})
        found[f"dense, 8 layers, CUDA graphs {graphs}"] = one
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        one = eight_bits.case(recipe, 1, {}, wide=False, micro=2)
        found[f"FP8 {recipe}"] = replace(one, model={key: value for key, value in one.model.items() if key != "moe"})
    return found


def count(one: LayoutCase) -> dict[str, int]:
    """Count a step after the first two."""
    trainer = CaseTrainer.build(one, device=torch.device("cuda", 0))
    trainer.run(2)
    read = ctypes.CDLL(None).null_gpu_count
    read.restype = ctypes.c_long
    before = [read(number) for number in range(len(KINDS))]
    trainer.step()
    return {kind: read(number) - before[number] for number, kind in enumerate(KINDS)}


def count_all() -> Counts:
    """Counts of each case, by name."""
    return {name: count(one) for name, one in cases().items()}


def main() -> None:
    """Record the counts."""
    RECORDED.write_text(json.dumps(count_all(), indent=1) + "\n")


if __name__ == "__main__":
    main()
