"""Entries of `ten_minutes.sh`: a short training run beside its plan, a comparison of two runs, and all results as one file.

The environment has `DEVICE` (cuda or cpu) and `OUT`, the folder of the results.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from mega_common.atomic_files import write_json_atomically
from mega_common.strict_config import apply_config_overrides
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.doctor.training_checks import write_tokens
from mega_trainer.job.environment import get_library_environment
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory
from mega_trainer.run.training_run import run_training

ROOT = Path(__file__).parents[2]
SKIPPED_STEPS = 3  # of compilation and caches
WIDE = {
    "num_layers": 8, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_kv_heads": 8,
    "vocab_size": 32000, "max_position": 8192,
}  # fmt: skip
SMALL = {
    "num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 16, "num_kv_heads": 8,
    "vocab_size": 32000, "max_position": 8192,
}  # fmt: skip
TINY = {"num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "vocab_size": 512}
EXPERTS = {"moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 1024}}
TINY_EXPERTS = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}}


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    out, device = Path(os.environ["OUT"]), os.environ["DEVICE"]
    match arguments:
        case ["train", name, ranks, *settings]:
            return train(out, device, name, int(ranks), settings)
        case ["same", one, other]:
            return compare(out, one, other)
        case ["collect"]:
            return collect(out, device)
    return 2


def run_yaml(device: str, size: str, ranks: int) -> dict[str, Any]:
    """The run of a size: on a GPU 4,096 or 8,192 tokens a row, on a CPU a dry run."""
    gpu = device == "cuda"
    model: Mapping[str, Any] = TINY
    if gpu:
        model = WIDE if size == "wide" else SMALL
    if size == "experts":
        model = {**model, **(EXPERTS if gpu else TINY_EXPERTS)}
    return {
        "model": model, "data": {"train": "tokens", "seq_length": 4096 if gpu else 128, "split": [1, 0, 0]},
        "batch": {"micro": 1, "global": 2 * ranks}, "train": {"steps": 20 if gpu else 6}, "optimizer": {"lr": 1e-3},
        "precision": "bf16", "checkpoint": {"save": False}, "log": {"tensorboard": False, "every": 1}, "device": device,
        "timeout_seconds": 30,
    }  # fmt: skip


def train(out: Path, device: str, name: str, ranks: int, settings: Sequence[str]) -> int:
    """Train a run and write its figures to `OUT/NAME.json`."""
    folder = out / name
    folder.mkdir(parents=True)
    size = next((setting[5:] for setting in settings if setting.startswith("size=")), "small")
    overrides = [setting for setting in settings if not setting.startswith("size=")]
    base = run_yaml(device, size, ranks)
    write_tokens(
        folder, base["model"]["vocab_size"], base["data"]["seq_length"] // 8
    )  # documents of a quarter of a row
    base["data"]["train"], base["output"] = str(folder / "tokens"), str(folder / "run")
    raw = apply_config_overrides(base, overrides)
    (folder / "run.yaml").write_text(yaml.safe_dump(raw))
    config = RunConfig.parse(raw)
    if ranks == 1:  # in this process: another one would import torch again
        os.environ.update(get_library_environment(config))
        run_training(config, RankInfo())
    else:
        command = [sys.executable, "-m", "mega_cli.main", "train", str(folder / "run.yaml"), "--nproc", str(ranks)]
        subprocess.run(command, check=True)
    write_json_atomically(out / f"{name}.json", figures(config, ranks, device))
    return 0


def figures(config: RunConfig, ranks: int, device: str) -> dict[str, Any]:
    """Speed, losses, and the peak memory of rank 0 beside the plan's."""
    path = Path(config.output) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    later = lines[SKIPPED_STEPS:]
    planned = sum(predict_memory(config.model, make_training_layout(config, ranks))[0].values())
    return {
        **{key: statistics.median(line[key] for line in later) for key in ("tokens_per_second", "mfu", "seconds")},
        "losses": [line["loss"] for line in lines],
        "grad_norms": [line["grad_norm"] for line in lines],
        "memory_bytes": max(line["memory_bytes"] for line in lines) if device == "cuda" else None,
        "planned_memory_bytes": planned,
    }


def compare(out: Path, one: str, other: str) -> int:
    """Whether two runs have the same losses and gradient norms, bit by bit."""
    first, second = (json.loads((out / f"{name}.json").read_text()) for name in (one, other))
    same = all(first[key] == second[key] for key in ("losses", "grad_norms"))
    print("the same" if same else f"{first['losses']} and {second['losses']}")
    return 0 if same else 1


def collect(out: Path, device: str) -> int:
    """Write all entries, with their exit status, seconds and figures, as one JSON file; print a line for each."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import record

    entries: dict[str, Any] = {}
    for line in (out / "entries").read_text().splitlines():
        name, status, seconds = line.split()
        found = out / f"{name}.json"
        content = json.loads(found.read_text()) if found.exists() else {}
        entries[name] = {"status": status, "seconds": int(seconds), **content}
        speed = f", {content['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in content else ""
        print(f"{name}: {'ok' if status == '0' else 'exit status ' + status}, {seconds} s{speed}")
    if device == "cuda":
        results = {"device": torch.cuda.get_device_name(), "devices": torch.cuda.device_count(), "entries": entries}
        print("written to", record.write("gpu", results, ["torch"]))
    else:
        path = ROOT / "build" / "gpu.json"
        path.parent.mkdir(exist_ok=True)
        write_json_atomically(path, {"entries": entries})
        print("written to", path)
    return int(any(entry["status"] not in ("0", "skipped") for entry in entries.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
