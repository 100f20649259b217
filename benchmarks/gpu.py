"""Training step on one GPU: speed of mega against transformers, share of the device's peak, memory, recomputation, experts.

    python benchmarks/gpu.py [--rounds 5] [--tiny]

As `train_step.py`, of a size that fills a GPU: contestants interleaved, ratios as medians over rounds. Memory is the
most that is allocated in a step, with weights and optimizer. mega keeps fp32 gradients, moments and main weights;
transformers has all of these in bf16.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from typing import Any

import record
import torch
from train_step import ours, seconds, settings, spread, theirs

from mega_trainer.build import dtype_of
from mega_trainer.config import RunConfig
from mega_trainer.metrics import Speed, memory_in_use
from mega_trainer.plan.flops import count_parameters

DENSE = {
    "num_layers": 16, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 16, "num_kv_heads": 8,
    "vocab_size": 32_768,
}  # fmt: skip
EXPERTS = DENSE | {
    "num_layers": 8,
    "moe": {"num_experts": 32, "top_k": 4, "ffn_hidden_size": 1024, "shared_ffn_hidden_size": 1024, "aux_loss": 0.01},
}  # fmt: skip
TINY = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_kv_heads": 2,
    "vocab_size": 512,
}  # fmt: skip
TINY_EXPERTS = TINY | {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32}}

Contestant = tuple[Callable[[RunConfig, torch.device], Callable[[], object]], RunConfig]


def contestants(*, tiny: bool) -> dict[str, Contestant]:
    rows, length = (2, 64) if tiny else (4, 4096)
    dense, experts = (TINY, TINY_EXPERTS) if tiny else (DENSE, EXPERTS)
    plain, selective, full = (settings("bf16", dense, rows, length, kind) for kind in ("none", "selective", "full"))
    return {
        "mega": (ours, plain),
        "transformers": (theirs, plain),
        "mega, selective": (ours, selective),
        "mega, full": (ours, full),
        "transformers, full": (theirs, full),
        "mega, experts": (ours, settings("bf16", experts, rows, length)),
    }


def measure(all_of_them: dict[str, Contestant], rounds: int, device: torch.device) -> dict[str, Any]:
    """Each contestant is alone on the device, and built anew for each round, so that none takes memory from another."""
    times: dict[str, list[float]] = {name: [] for name in all_of_them}
    memory = dict.fromkeys(all_of_them, 0)
    for number in range(rounds):
        for name, (make, config) in all_of_them.items():
            step = make(config, device)
            step()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            times[name].append(seconds(step, device))
            memory[name] = max(memory[name], memory_in_use())
            del step
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(f"round {number + 1} of {rounds}: {name}: {times[name][-1] * 1e3:.0f} ms", flush=True)
    return {name: described(all_of_them[name][1], times[name], memory[name], device) for name in all_of_them} | {
        "speed over transformers": ratio(times["transformers"], times["mega"]),
        "speed over transformers, full": ratio(times["transformers, full"], times["mega, full"]),
        "time with selective recomputation": ratio(times["mega, selective"], times["mega"]),
        "time with full recomputation": ratio(times["mega, full"], times["mega"]),
    }


def described(config: RunConfig, times: list[float], memory: int, device: torch.device) -> dict[str, Any]:
    speed = Speed.of(config, device, dtype_of(config), world_size=1)
    count = count_parameters(config.model)
    rate = config.batch.micro * config.data.seq_length / statistics.median(times)
    achieved = rate * speed.exact
    return {
        "parameters": count.total,
        "active_parameters": count.active,
        "batch": [config.batch.micro, config.data.seq_length],
        "tokens_per_second": round(rate),
        "tflops": round(achieved / 1e12, 2),
        "mfu": round(achieved / speed.peak, 3),
        "peak_gb": round(memory / 1e9, 2),
    }


def ratio(these: list[float], those: list[float]) -> dict[str, float]:
    return spread([one / other for one, other in zip(these, those, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="try the script on a CPU; nothing is written")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --tiny tries the script")
    device = torch.device("cpu" if options.tiny else "cuda")
    results = measure(contestants(tiny=options.tiny), options.rounds, device)
    for name, result in results.items():
        print(name, result)
    if not options.tiny:
        results = {"device": torch.cuda.get_device_name(device), **results}
        print("written to", record.write("gpu", results, ["torch", "transformers"]))


if __name__ == "__main__":
    main()
