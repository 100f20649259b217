"""How fast is conversion against `cp` of the same files, and how much memory does it take?

    python benchmarks/convert.py --folder DISK [--layers 16] [--rounds 5]

Makes a Llama of the 1B shape (2.5 GB in bf16) in DISK, then in each round: `cp` and fsync of its files, one conversion, `cp`
once more, the other conversion, `cp` a third time; HuggingFace to mega comes first in every other round. Each conversion is
compared with the two copies around it, so that what else the machine does falls on both sides, and the median over the rounds
counts. Each runs in its own process, whose peak memory is reported with what the imports alone take. `cpu_over_cp` is the ratio
of processor seconds, without the imports, which does not change with the load of the machine.
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

from mega_ckpt.families import find_family_by_name
from mega_ckpt.formats.safetensors_file import SafetensorsHeader, write_safetensors
from mega_common.model_config import ModelConfig


def make_model(folder: Path, layers: int) -> tuple[int, int]:
    """Write a HuggingFace folder of random bf16 weights; returns the bytes of all tensors and of the largest."""
    model = ModelConfig.model_validate(
        {"num_layers": layers, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 32,
         "num_kv_heads": 8, "vocab_size": 128_256, "tie_embeddings": True}
    )  # fmt: skip
    family = find_family_by_name("llama")
    tensors = {name: (torch.bfloat16, disk.shape) for name, disk in family.disk_tensor_table(model).items()}
    header = SafetensorsHeader.make_header(tensors, {"format": "pt"})
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(family.write_config_json(model)))
    write_safetensors(
        folder / "model.safetensors", header, (torch.randn(e.shape).to(e.dtype) for e in header.entries.values())
    )
    return header.total_bytes, max(entry.stop - entry.start for entry in header.entries.values())


def child(task: str, source: str, destination: str) -> None:
    """One measured task; prints its seconds, peak bytes and the bytes that were taken before it."""
    from mega_ckpt.convert import convert_checkpoint

    # Not before the imports: memory that was free for two seconds a virtual machine gives back to its host, and large
    # writes, which take whole free megabytes, then wait for it, while cp, which writes page by page, takes what is left.
    shutil.rmtree(destination, ignore_errors=True)
    os.sync()
    before, start, imports = peak(), time.perf_counter(), cpu()
    if task == "cp":
        subprocess.run(["cp", "-r", source, destination], check=True)
        for path in Path(destination).iterdir():
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
    else:
        convert_checkpoint(source, destination, task)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "cpu": cpu() - imports, "peak": peak(), "before": before}))


def cpu() -> float:
    """Processor seconds of this process and its ended children so far."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def peak() -> int:
    """Most bytes this process has held so far, mapped files included."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def measure(task: str, source: Path, destination: Path) -> dict[str, float]:
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


Round = dict[str, list[dict[str, float]]]
TASKS = {"mega": ("hf", "mega"), "hf": ("mega", "back")}  # {format to write: (source, destination)}


def run(root: Path, layers: int, rounds: int) -> tuple[int, int, list[Round]]:
    """Bytes of all tensors and of the largest; each round's measurements: three of `cp`, one of each conversion."""
    total, largest = make_model(root / "hf", layers)
    found = []
    for number in range(rounds + 1):  # the first round fills the page cache and is not counted
        one: Round = {"cp": [measure("cp", root / "hf", root / "copy")]}
        for task in sorted(TASKS, reverse=number % 2 == 0):
            source, destination = TASKS[task]
            one[task] = [measure(task, root / source, root / destination)]
            one["cp"].append(measure("cp", root / "hf", root / "copy"))
        found.append(one)
    return total, largest, found[1:]


def over_cp(rounds: list[Round], task: str, what: str) -> list[float]:
    """Of each round, what the conversion took over the mean of the copies before and after it."""
    out = []
    for one in rounds:
        place = [name for name in one if name != "cp"].index(task)
        around = one["cp"][place : place + 2]
        out.append(one[task][0][what] / statistics.mean(copy[what] for copy in around))
    return out


def report(total: int, largest: int, rounds: list[Round]) -> None:
    seconds = {task: [one["seconds"] for each in rounds for one in each[task]] for task in ("cp", *TASKS)}
    memory = {task: max(one["peak"] for each in rounds for one in each[task]) for task in ("cp", *TASKS)}
    before = rounds[0]["cp"][0]["before"]
    shares = {task: [1 / ratio for ratio in over_cp(rounds, task, "seconds")] for task in TASKS}
    figures = {
        "bytes": total,
        "largest_tensor_bytes": largest,
        "bytes_per_second": {task: total / statistics.median(values) for task, values in seconds.items()},
        "share_of_cp": {task: statistics.median(values) for task, values in shares.items()},
        "share_of_cp_rounds": shares,
        "cpu_over_cp": {task: statistics.median(over_cp(rounds, task, "cpu")) for task in TASKS},
        "seconds": seconds,
        "peak_bytes": memory,
        "imports_bytes": before,
        "peak_over_largest": {task: (memory[task] - before) / largest for task in TASKS},
    }
    print(json.dumps(figures, indent=1))
    print(record.write("convert", figures, ["torch", "xxhash"]), file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
