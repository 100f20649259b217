"""How fast is conversion against `cp` of the same files, and how much memory does it take?

    python benchmarks/convert.py --folder DISK [--layers 16] [--rounds 5]

Makes a Llama of the 1B shape (2.5 GB in bf16) in DISK, then in each round: `cp` and fsync of its files, HuggingFace to mega,
mega to HuggingFace. Interleaved, so that whatever else the machine does falls on all three. Each runs in its own process,
whose peak memory is told with what the imports alone take. A busy machine slows what computes more than what waits for the
disk: `cpu_seconds` (imports included for mega and hf) and the best rounds tell more there than the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import record
import torch

from mega_ckpt.families import family_named
from mega_ckpt.formats.safetensors import Header, write_file
from mega_common.model_config import ModelConfig


def make_model(folder: Path, layers: int) -> tuple[int, int]:
    """Write a HuggingFace folder of random bf16 weights; returns the bytes of all tensors and of the largest."""
    model = ModelConfig.model_validate(
        {"num_layers": layers, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 32,
         "num_kv_heads": 8, "vocab_size": 128_256, "tie_embeddings": True}
    )  # fmt: skip
    family = family_named("llama")
    tensors = {name: (torch.bfloat16, disk.shape) for name, disk in family.table(model).items()}
    header = Header.make(tensors, {"format": "pt"})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(family.write_config(model)))
    write_file(
        folder / "model.safetensors", header, (torch.randn(e.shape).to(e.dtype) for e in header.entries.values())
    )
    return header.size, max(entry.stop - entry.start for entry in header.entries.values())


def child(task: str, source: str, destination: str) -> None:
    """One measured task; prints its seconds, peak bytes and the bytes that were taken before it."""
    from mega_ckpt.convert import convert

    before, start = peak(), time.perf_counter()
    if task == "cp":
        subprocess.run(["cp", "-r", source, destination], check=True)
        for path in Path(destination).iterdir():
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
    else:
        convert(source, destination, task)
    used = os.times()
    cpu = used.user + used.system + used.children_user + used.children_system
    print(json.dumps({"seconds": time.perf_counter() - start, "cpu": cpu, "peak": peak(), "before": before}))


def peak() -> int:
    """Most bytes this process has held so far, mapped files included."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def measure(task: str, source: Path, destination: Path) -> dict[str, float]:
    shutil.rmtree(destination, ignore_errors=True)
    os.sync()
    command = [sys.executable, __file__, "--child", task, str(source), str(destination)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an existing folder on the disk to measure")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    root = options.folder / "convert-benchmark"
    try:
        report(*run(root, options.layers, options.rounds))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def run(root: Path, layers: int, rounds: int) -> tuple[int, int, dict[str, list[dict[str, float]]]]:
    total, largest = make_model(root / "hf", layers)
    found: dict[str, list[dict[str, float]]] = {"cp": [], "mega": [], "hf": []}
    for _ in range(rounds + 1):  # the first round fills the page cache and is not counted
        found["cp"].append(measure("cp", root / "hf", root / "copy"))
        found["mega"].append(measure("mega", root / "hf", root / "mega"))
        found["hf"].append(measure("hf", root / "mega", root / "back"))
    return total, largest, {task: results[1:] for task, results in found.items()}


def report(total: int, largest: int, found: dict[str, list[dict[str, float]]]) -> None:
    rates = {task: [total / one["seconds"] for one in results] for task, results in found.items()}
    best = {task: max(values) for task, values in rates.items()}
    memory = {task: max(one["peak"] for one in results) for task, results in found.items()}
    figures = {
        "bytes": total,
        "largest_tensor_bytes": largest,
        "bytes_per_second": {task: statistics.median(values) for task, values in rates.items()},
        "share_of_cp": {
            task: statistics.median(mine / cp for mine, cp in zip(rates[task], rates["cp"], strict=True))
            for task in ("mega", "hf")
        },
        "share_of_cp_best_rounds": {task: best[task] / best["cp"] for task in ("mega", "hf")},
        "cpu_seconds": {task: statistics.median(one["cpu"] for one in results) for task, results in found.items()},
        "rounds": rates,
        "peak_bytes": memory,
        "imports_bytes": found["cp"][0]["before"],
        "peak_over_largest": {task: (memory[task] - found["cp"][0]["before"]) / largest for task in ("mega", "hf")},
    }
    print(json.dumps(figures, indent=1))
    print(record.write("convert", figures, ["torch", "xxhash"]), file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
