"""FLOPs a token as each source of published runs counts them: the planner's conventions beside what the sources state.

    python benchmarks/plan_flops.py RUNS.csv

A source that states both FLOP/s (or MFU) and tokens a second of a run states FLOPs a token. Left out: fine-tuning, which counts
frozen weights and packed samples by rules of its own, and models that a table names without their sizes.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
from published import GPUS, Row, model_of, number

from mega_common.model_config import ModelConfig
from mega_trainer.plan.flops import FlopsConvention, compute_flops_by_convention
from mega_trainer.plan.machine import load_machine

GOAL = 0.005
# By a word of the source, the first that is found; a source that is not here counts as PaLM does.
CONVENTIONS: dict[str, FlopsConvention] = {
    "torchtitan 2024 FSDP": "mosaic", "causal-halved": "megatron", "Grok": "megatron", "Mosaic": "mosaic", "torchtitan": "palm", "full-attention": "full",
}  # fmt: skip
# Teraflops that dgxc-benchmarking divides by: data sheets have 989.4 and 2500, the README of Grok 2450 for GB200.
PEAKS = {("dgxc", "GB200"): 2450.0}
# Llama-3.1-405B was first published with 16 key/value heads, and is so counted there; it has 8.
KEY_VALUE_HEADS = {("dgxc", "Llama3.1-405B"): 16}


def convention_of(row: Row) -> FlopsConvention:
    """What the source of a row counts by."""
    told = row["model"] if row["model"].startswith("Grok") else row["source"]
    return next((kind for word, kind in CONVENTIONS.items() if word in told), "palm")


def told(row: Row) -> float:
    """FLOPs a token, by what a row states; 0 where it does not."""
    rate = float(row["tokens_per_s_per_gpu"] or 0)
    if rate and row["tflops_per_gpu"]:
        return float(row["tflops_per_gpu"]) * 1e12 / rate
    if not rate or not row["mfu"] or row["gpu"] not in GPUS:
        return 0.0
    source = row["source"].split("-")[0]
    precise = "fp8" if source == "dgxc" and row["precision"] == "fp8" else "bf16"
    peak = load_machine(GPUS[row["gpu"]]).get_peak_flops(precise) / 1e12
    if (source, row["gpu"]) in PEAKS:
        peak = PEAKS[source, row["gpu"]] * (2 if precise == "fp8" else 1)
    return float(row["mfu"]) / 100 * peak * 1e12 / rate


def rounding(row: Row) -> float:
    """By how much the figures of a row may be off for their digits alone."""
    figure = row["tflops_per_gpu"] or row["mfu"]
    digits = [(float(text), len(text.partition(".")[2])) for text in (figure, row["tokens_per_s_per_gpu"])]
    return math.fsum(0.5 * 0.1**places / value for value, places in digits)


def counted(row: Row, model: ModelConfig) -> float:
    """FLOPs a token, by the planner."""
    for (source, name), heads in KEY_VALUE_HEADS.items():
        if row["source"].startswith(source) and row["model"].startswith(name):
            model = model.model_copy(update={"num_kv_heads": heads})
    return compute_flops_by_convention(model, number(row, "seq") or 8192, convention_of(row))


def compared(path: Path) -> Iterator[dict[str, Any]]:
    """Each row that states its FLOPs, with the planner's."""
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tuned = any(word in row["source"] + row["model"] for word in ("LoRA", "SFT"))
            model = None if tuned or not told(row) else model_of(row)
            if model is not None:
                yield {
                    "source": row["source"].split(";")[0].split("(")[0].split('"')[0].strip(), "model": row["model"],
                    "convention": convention_of(row), "error": counted(row, model) / told(row) - 1, "rounding": rounding(row),
                }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    rows = list(compared(parser.parse_args().runs))
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["source"], row["model"], row["convention"]].append(row)
    table: list[dict[str, Any]] = [
        {
            "source": source, "model": model, "convention": kind, "runs": len(some),
            "median_error": round(statistics.median(row["error"] for row in some), 5),
            "furthest": round(max((row["error"] for row in some), key=abs), 5),
        }
        for (source, model, kind), some in groups.items()
    ]  # fmt: skip
    beyond = [row for row in rows if abs(row["error"]) > GOAL + row["rounding"]]
    summary = {
        "runs": len(rows), "median_error": statistics.median(abs(row["error"]) for row in rows),
        "beyond 0.5 % and the rounding of the figures": len(beyond),
        "groups": len(table), "groups whose median is within 0.5 %": sum(abs(g["median_error"]) <= GOAL for g in table),
    }  # fmt: skip
    for group in sorted(table, key=lambda group: -abs(group["median_error"])):
        print(group)
    print(summary)
    print(record.write("plan_flops", {**summary, "table": table, "beyond": beyond}))


if __name__ == "__main__":
    main()
