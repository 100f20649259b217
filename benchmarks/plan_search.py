"""Whether the search finds what others found by trying: its choice beside the best layouts of published sweeps.

    python benchmarks/plan_search.py RUNS.csv
    python benchmarks/plan_search.py --times

For each published best of a sweep (nanotron's of 1.34B and 8.86B; of NVIDIA's recipes for H100s each model's and precision's
for fewest GPUs) the search gets the same model, batch, precision and GPUs; both layouts are then predicted as this trainer
would run them. Whether the published one fits by our plan is recorded: others keep less, or offload.

With --times instead how long searches of large models take, on one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import record
from published import Published, published

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.strict_config import load_yaml_mapping
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.plan.device_memory import add_device_memory
from mega_trainer.plan.layout_candidates import RECOMPUTE, list_layout_settings
from mega_trainer.plan.layout_search import find_best_layouts, format_layout, make_planned_run
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.memory_advice import apply_settings, make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory
from mega_trainer.plan.training_layout import TrainingLayout

NEAR = 1.03
RECIPES, SWEEP = ("dgxc-benchmarking v25.04.01", "Megatron-Bridge"), "nanotron ultra-scale sweep"
MOST = 512  # GPUs
RECIPE_FILES = Path(__file__).parents[1] / "recipes"
LARGE = [
    ("llama3-8b-8", 8),
    ("deepseek-v3-1024", 1024),
    ("llama3-405b-4096", 16384),
    ("qwen3-235b-a22b-256", 256),
]  # recipes, and H100s


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
    found = find_best_layouts(config, run.gpus, run.machine)
    best = found[0]
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
    shape = make_training_layout(theirs, run.gpus)
    # a source that leaves recomputation open may have used any
    kinds = [shape.recompute] if run.row["recompute"] else RECOMPUTE
    most = min(_most_memory(theirs.model, replace(shape, recompute=kind)) for kind in kinds)
    return told | {
        "published": format_layout(list_layout_settings(run.run)), "published_seconds": seconds, "published_fits": most <= run.machine.usable_memory_bytes,
        "ratio": best.time.seconds / seconds, "faster_layouts": sum(layout.time.seconds < seconds for layout in found),
    }  # fmt: skip


def _most_memory(model: ModelConfig, shape: TrainingLayout) -> int:
    """Return the bytes of the rank that needs most."""
    return max(sum(add_device_memory(shape, kinds).values()) for kinds in predict_memory(model, shape))


def timed(recipe: str, gpus: int) -> dict[str, Any]:
    """Return the processor seconds of a search for a recipe's model, batch and precision."""
    raw = load_yaml_mapping(RECIPE_FILES / f"{recipe}.yaml")
    del raw["parallel"]
    config = RunConfig.parse(resolve_run_config(raw), source=recipe)
    start = time.process_time()
    best = find_best_layouts(config, gpus, load_machine("h100"))[0]
    took = time.process_time() - start
    return {"recipe": recipe, "gpus": gpus, "took": took, "search": format_layout(best.settings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--times", action="store_true")
    options = parser.parse_args()
    if options.times == (options.runs is not None):
        parser.error("requires either RUNS.csv or --times")
    if options.times:
        print(record.write("plan_search_times", [timed(*large) for large in LARGE]))
        return
    rows = []
    for run in swept(options.runs):
        rows.append(compared(run))
        print(rows[-1], flush=True)
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    summary = {
        "compared": len(ratios),
        "published among the first three, or within 3 % of the first": sum(
            row["faster_layouts"] < 3 or row["ratio"] >= 1 / NEAR for row in rows if "ratio" in row
        ),
        "worst": max(ratios),
    }
    print(summary)
    print(record.write("plan_search", {**summary, "rows": rows}))


if __name__ == "__main__":
    main()
