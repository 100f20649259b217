"""Whether the search finds what others found by trying: its choice beside the best layouts of published sweeps.

    python benchmarks/plan_search.py RUNS.csv

For each published best of a sweep (nanotron's of 1.34B and 8.86B; of NVIDIA's recipes for H100s each model's and precision's
for fewest GPUs) the search gets the same model, batch, precision and GPUs; both layouts are then predicted as this trainer
would run them. Whether the published one fits by our plan is told: others keep less, or offload.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
from published import Published, published

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.plan.layout_candidates import list_layout_settings
from mega_trainer.plan.layout_search import find_best_layouts, format_layout, make_planned_run
from mega_trainer.plan.memory_advice import apply_settings, make_run_shape
from mega_trainer.plan.memory_prediction import predict_memory

GOAL = 1.05
RECIPES, SWEEP = ("dgxc-benchmarking v25.04.01", "Megatron-Bridge"), "nanotron ultra-scale sweep"
MOST = 512  # GPUs


def swept(runs: Path) -> Iterator[Published]:
    """Runs of sources that chose among many layouts."""
    fewest: dict[tuple[str, str], Published] = {}
    for run in published(runs):
        if run.source == SWEEP and run.row["model"] != "Llama-like-80B":
            yield run
        key = run.row["model"], run.run.precision
        whole = run.source in RECIPES and run.row["gpu"] == "H100" and "proxy" not in run.row["model"]
        if whole and run.gpus <= min(MOST, fewest[key].gpus if key in fewest else MOST):
            fewest[key] = run
    yield from fewest.values()


def compared(run: Published) -> dict[str, Any]:
    """The published layout and the search's, both predicted."""
    batch = run.run.micro_batch * run.run.microbatches * run.run.dp
    config = RunConfig.parse(
        {
            "model": run.model.model_dump(mode="json", exclude_none=True), "precision": run.run.precision,
            "data": {"train": ["none"], "seq_length": run.run.seq_length}, "batch": {"global": batch},
        }
    )  # fmt: skip
    told: dict[str, Any] = {"run": f"{run.source}, {run.row['model']} on {run.gpus}", "precision": run.run.precision}
    start = time.process_time()
    best = find_best_layouts(config, run.gpus, run.machine)[0]
    told["measured_seconds"] = run.seconds
    told |= {
        "search": format_layout(best.settings),
        "search_seconds": best.time.seconds,
        "took": time.process_time() - start,
    }
    try:
        theirs = apply_settings(config, list_layout_settings(run.run))
        theirs.check_world_size(run.gpus)
    except ConfigError as error:
        return told | {"published": f"not legal here: {error.message}"}
    seconds = make_planned_run(theirs, run.gpus, run.machine).predict_step_time().seconds
    most = max(sum(kinds.values()) for kinds in predict_memory(theirs.model, make_run_shape(theirs, run.gpus)))
    return told | {
        "published": format_layout(list_layout_settings(run.run)), "published_seconds": seconds, "published_fits": most <= run.machine.usable_memory_bytes,
        "ratio": best.time.seconds / seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    rows = []
    for run in swept(parser.parse_args().runs):
        rows.append(compared(run))
        print(rows[-1], flush=True)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    summary = {
        "compared": len(ratios),
        "within 5 % or better": sum(ratio <= GOAL for ratio in ratios),
        "worst": max(ratios),
    }
    print(summary)
    print(record.write("plan_search", {**summary, "rows": rows}))


if __name__ == "__main__":
    main()
