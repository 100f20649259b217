"""Compare the layouts that the search finds with the best layouts of published sweeps.

    python benchmarks/plan_search.py RUNS.csv [--sweep SWEEP.csv]
    python benchmarks/plan_search.py --times

For each published best of a sweep (nanotron's of 1.34B and 8.86B; of NVIDIA's recipes for H100s each model's and precision's
for fewest GPUs) the search gets the same model, batch, precision and GPUs, restricted to what the source's trainer can do
(`--like`). NeMo's release of April 2025 had no recomputation of norms and activations. Of all published runs it is counted how
many the planner says to fit, as they did: a source that leaves recomputation open may have used any.

SWEEP.csv is nanotron's table of all layouts that it tried (bench_final2_mfu2.csv of the repository gkarfakis19/Rapid-LLM,
folder validation_scripts/huggingface_data): for each model and number of GPUs with at least five measured layouts, the place of
the one with most tokens per second in the predicted order, and how many layouts are rightly said to fit or to run out of memory.
Only the search's margin for memory is from published figures of this trainer and others. With SWEEP.csv the rows of its models also have
the speed that the sweep measured for the layout that the search puts first, and the place of the published best in the predicted
order of the layouts that the sweep ran. Two kinds of jobs are left out of orders, by the table's own columns: pipelines over several
nodes before the sweep's fix of its pipelines (most took 5 to 30 times as long as predicted), and jobs with a node whose all-reduce was under half the usual.

With --times instead how long searches of large models take, on one core.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import record
from plan_fit import Predictor
from published import Published, published, sweep_machine

from mega_common.model_config import ModelConfig
from mega_common.strict_config import load_yaml_mapping
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.plan.device_memory import SLACK, add_non_tensor_memory
from mega_trainer.plan.layout_candidates import RECOMPUTE, LayoutSettings, list_layout_settings
from mega_trainer.plan.layout_search import explain_layout_time, find_best_layouts, format_layout_settings, plan_layout
from mega_trainer.plan.machine import load_default_efficiencies, load_machine
from mega_trainer.plan.other_trainer_memory import TrainerName
from mega_trainer.plan.other_trainers import OTHER_TRAINERS, SEARCH_MARGIN, OtherTrainer
from mega_trainer.plan.step_time import PlannedRun
from mega_trainer.plan.training_layout import TrainingLayout

NEAR, SAME = 1.03, 1e-6
NODE_TEST = "AR Intra-node (GB/s)"
LEAST_TRIED = 5  # measured layouts of a list
SIZES = {  # of nanotron's models by billions of parameters: layers, width, feed-forward width, heads
    "1.34": (16, 2048, 8192, 32), "3.57": (28, 3072, 8192, 32), "8.86": (32, 4096, 14_336, 32), "80.0": (80, 8192, 28_672, 64),
}  # fmt: skip
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


def trainer_of(run: Published, predictor: Predictor) -> OtherTrainer:
    """The trainer of a published run, as its source ran it."""
    name: TrainerName = "nanotron" if run.maker == "nanotron" else "fsdp2" if run.maker == "torchtitan" else "megatron"
    constants = json.loads((Path(__file__).parent / "results" / "plan_time.json").read_text())["results"]["constants"]
    trainer = replace(OTHER_TRAINERS[name], profile=predictor.planned(run, constants).cost_model.profile)
    return replace(trainer, recompute=("none", "full")) if "dgxc" in run.source else trainer


def compared(run: Published, like: OtherTrainer) -> dict[str, Any]:
    """The published layout and those of a search for its trainer, all predicted."""
    batch = run.run.micro_batch * run.run.microbatches * run.run.dp
    config = RunConfig.parse(
        {
            "model": run.model.model_dump(mode="json", exclude_none=True), "precision": run.run.precision,
            "data": {"train": ["none"], "seq_length": run.run.seq_length}, "batch": {"global": batch},
        }
    )  # fmt: skip
    told: dict[str, Any] = {"run": f"{run.source}, {run.row['model']} on {run.gpus}", "precision": run.run.precision}
    start = time.process_time()
    found = find_best_layouts(config, run.gpus, run.machine, like=like)
    told |= {"like": like.name, "measured_seconds": run.seconds, "took": time.process_time() - start}
    told |= {"search": format_layout_settings(found[0].settings), "search_seconds": found[0].time.seconds}
    told["layout"] = name_of(found[0].settings)
    theirs = plan_layout(config, list_layout_settings(run.run), run.gpus, run.machine, like=like)
    if theirs is None:
        return told | {"published": "not legal here"}
    faster = [layout for layout in found if layout.time.seconds < (1 - SAME) * theirs.time.seconds]
    ratio = found[0].time.seconds / theirs.time.seconds
    return told | {
        "published": format_layout_settings(theirs.settings), "published_layout": name_of(theirs.settings), "published_seconds": theirs.time.seconds, "ratio": ratio,
        "published_fits": theirs.memory <= run.machine.usable_memory_bytes, "faster_layouts": len(faster),
        "near": len(faster) < 3 or ratio >= 1 / NEAR, "difference": explain_layout_time(theirs, found[0]),
    }  # fmt: skip


def name_of(settings: LayoutSettings) -> str:
    """A layout as it is named in lists of what the sweep tried."""
    values = {path.rpartition(".")[2]: value for path, value in settings.items()}
    words = [f"{key} {values[key]}" for key in ("dp", "tp", "pp", "micro", "zero") if key in values]
    return " ".join(words) + " recompute" * (values["recompute"]["kind"] != "none")


def place_of(layout: str, tried: Sequence[Mapping[str, Any]], limit: float) -> dict[str, Any] | None:
    """How many of the layouts that ran are predicted to be faster than this one, and which is the fastest; None if it is not
    among them.
    """
    ran = order(tried, limit)
    own = next((each for each in ran if each["layout"] == layout), None)
    if own is None:
        return None
    faster = sum(each["seconds"] < (1 - SAME) * own["seconds"] for each in ran)
    first = ran[0]
    return {
        "ran": len(ran), "faster_layouts": faster, "near": faster < 3 or first["seconds"] / own["seconds"] >= 1 / NEAR,
        "first": first["layout"], "first_slower": own["rate"] / first["rate"] - 1,
    }  # fmt: skip


def order(tried: Sequence[Mapping[str, Any]], limit: float) -> list[Mapping[str, Any]]:
    """Sound jobs that ran, with layouts that a search would take, in the predicted order."""
    ran = (each for each in tried if each["rate"] and each["sound"] and SEARCH_MARGIN * each["memory"] <= limit)
    return sorted(ran, key=lambda each: each["seconds"])


def measured_of(layout: str, tried: Sequence[Mapping[str, Any]]) -> str:
    """The speed that the sweep measured of a layout, relative to its fastest."""
    found = max((each["rate"] for each in tried if each["layout"] == layout), default=None)
    if found is None:
        return "not tried"
    return f"{found / max(each['rate'] for each in tried) - 1:+.1%} of the fastest" if found else "out of memory"


def said_to_fit(run: Published, like: OtherTrainer) -> bool:
    """Whether the planner says that a run fits, which it did."""
    kinds = [run.run.recompute] if run.row["recompute"] else RECOMPUTE
    return any(
        most_memory(run.model, replace(run.run, recompute=kind), like) <= run.machine.usable_memory_bytes
        for kind in kinds
    )


def most_memory(model: ModelConfig, shape: TrainingLayout, like: OtherTrainer) -> int:
    """Return the bytes of the rank that needs most."""
    return max(sum(add_non_tensor_memory(shape, kinds).values()) for kinds in like.predict_memory(model, shape))


def tried(table: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Layouts of nanotron's sweep by model and GPUs, each with tokens per second and GPU (0: out of memory) and the prediction."""
    lists: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    nanotron, bases = OTHER_TRAINERS["nanotron"], dict[str, PlannedRun]()
    with table.open(encoding="utf-8") as file:
        jobs = list(csv.DictReader(file))
        usual = statistics.median(float(row[NODE_TEST]) for row in jobs if row[NODE_TEST])
        for row in jobs:
            if row["status"] not in ("Success", "OOM") or row["num_params"] not in SIZES or not row["dp"]:
                continue
            dp, tp, pp, micro, steps, zero = (
                int(float(row[name])) for name in ("dp", "tp", "pp", "mbs", "batch_accum", "zero_stage")
            )
            if (float(row["seq_len"]), dp * micro * steps) != (4096, 256):
                continue
            layers, hidden, wide, heads = SIZES[row["num_params"]]
            model = ModelConfig.parse(
                {
                    "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": wide, "num_attention_heads": heads,
                    "vocab_size": 131_072, "tie_embeddings": wide < 10_000,
                }
            )  # fmt: skip
            run = TrainingLayout(4096, micro, steps, tp=tp, sp=tp > 1, pp=pp, dp=dp, zero=zero)
            if row["num_params"] not in bases:
                alone, machine = replace(run, tp=1, sp=False, pp=1, dp=1), sweep_machine()
                bases[row["num_params"]] = PlannedRun.from_settings(
                    model, alone, machine, machine.achieved_efficiency, nanotron.profile
                )
            planned = bases[row["num_params"]].with_training_layout(run)
            lists[f"{row['num_params']}B", dp * tp * pp].append(
                {
                    "layout": f"dp {dp} tp {tp} pp {pp} micro {micro} zero {zero}",
                    "rate": float(row["tok/s/gpu"]) if row["status"] == "Success" else 0.0,
                    "seconds": planned.predict_step_time().seconds,
                    "memory": most_memory(model, run, nanotron), "tp": tp,
                    "sound": (pp == 1 or row["nodes"] == "1.0" or row["after_pp_fix"] == "True")
                    and float(row[NODE_TEST] or usual) > usual / 2,
                    "reserved": float(row["Mem Res (GB)"] or 0) * 2**30,
                    "reserves": SLACK * sum(nanotron.predict_memory(model, run)[0].values()),
                }
            )  # fmt: skip
    return lists


def ranked(lists: dict[tuple[str, int], list[dict[str, Any]]], limit: float) -> dict[str, Any]:
    """How well the predicted order of each list finds its fastest layout, and how many are rightly said to fit."""
    rows, every = [], [layout for layouts in lists.values() for layout in layouts]
    for (model, gpus), layouts in sorted(lists.items()):
        ran, fitting = [layout for layout in layouts if layout["rate"] and layout["sound"]], order(layouts, limit)
        if len(ran) < LEAST_TRIED or not fitting:
            continue
        best = max(ran, key=lambda layout: layout["rate"])
        faster = sum(layout["seconds"] < (1 - SAME) * best["seconds"] for layout in fitting)
        first = fitting[0]
        rows.append(
            {
                "model": model, "gpus": gpus, "ran": len(ran), "best": best["layout"], "faster_layouts": faster,
                "near": faster < 3 or first["seconds"] / best["seconds"] >= 1 / NEAR, "first": first["layout"],
                "first_slower": best["rate"] / first["rate"] - 1,
                "best_of_three_slower": best["rate"] / max(layout["rate"] for layout in fitting[:3]) - 1,
            }
        )  # fmt: skip
    ran, not_run = ([each for each in every if bool(each["rate"]) is did] for did in (True, False))
    within = [each for each in every if limit / SEARCH_MARGIN < each["memory"] <= limit]
    known = [each for each in ran if each["reserved"]]
    return {
        "layouts": len(every), "lists": len(rows), "best among the first three, or within 3 %": sum(r["near"] for r in rows),
        "median loss of the best of the first three": statistics.median(r["best_of_three_slower"] for r in rows),
        "unsound jobs, of which no order is taken": sum(not each["sound"] for each in ran),
        "ran": len(ran), "ran and said to fit": sum(each["memory"] <= limit for each in ran),
        "out of memory": len(not_run), "out of memory and said not to fit": sum(each["memory"] > limit for each in not_run),
        "ran, by model": {
            model: f"{sum(each['memory'] <= limit for each in some)} of {len(some)} said to fit"
            for model in sorted({name for name, _ in lists})
            for some in [[each for (name, _), own in lists.items() if name == model for each in own if each["rate"]]]
        },
        "ran and said not to fit, on over 8 tensor ranks": sum(each["memory"] > limit and each["tp"] > 8 for each in ran),
        "left out by the margin of a search": {
            "out of memory": sum(not each["rate"] for each in within), "ran": sum(bool(each["rate"]) for each in within),
        },
        "reserved memory of the first rank, median error":
            statistics.median(abs(each["reserves"] / each["reserved"] - 1) for each in known),
        "rows": rows,
    }  # fmt: skip


def timed(recipe: str, gpus: int) -> dict[str, Any]:
    """Return the processor seconds of a search for a recipe's model, batch and precision."""
    raw = load_yaml_mapping(RECIPE_FILES / f"{recipe}.yaml")
    raw["parallel"] = {key: value for key, value in raw["parallel"].items() if key == "dispatch"}
    config = RunConfig.parse(resolve_run_config(raw), source=recipe)
    start = time.process_time()
    best = find_best_layouts(config, gpus, load_machine("h100"))[0]
    took = time.process_time() - start
    return {"recipe": recipe, "gpus": gpus, "took": took, "search": format_layout_settings(best.settings)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?")
    parser.add_argument("--sweep", type=Path, metavar="SWEEP.csv")
    parser.add_argument("--times", action="store_true")
    options = parser.parse_args()
    if options.times == (options.runs is not None):
        parser.error("requires either RUNS.csv or --times")
    if options.times:
        print(record.write("plan_search_times", [timed(*large) for large in LARGE]))
        return
    runs = [run for run in published(options.runs) if run.machine.generation in ("hopper", "ampere", "blackwell")]
    predictor = Predictor(runs, load_default_efficiencies())
    rows, lists, limit = [], tried(options.sweep) if options.sweep else {}, load_machine("h100").usable_memory_bytes
    for run in swept(options.runs):
        like = trainer_of(run, predictor)
        rows.append(compared(run, like))
        if lists and run.source == SWEEP:
            own = lists[run.row["model"].removeprefix("Llama-like-"), run.gpus]
            rows[-1]["the sweep had of the first"] = measured_of(rows[-1]["layout"], own)
            rows[-1]["among what the sweep ran"] = place_of(rows[-1]["published_layout"], own, limit)
    near = [row["near"] for row in rows if "near" in row]
    fit = by_maker(runs, predictor)
    summary: dict[str, Any] = {
        "compared": len(near), "published among the first three, or within 3 % of the first": sum(near),
        "best layouts that are said to fit": sum(row.get("published_fits", False) for row in rows),
        "published runs that are said to fit": fit,
    }  # fmt: skip
    if options.sweep:
        among = [row["among what the sweep ran"] for row in rows if row.get("among what the sweep ran")]
        equal = sum(place["first_slower"] < NEAR - 1 for place in among)
        summary["published, among what the sweep ran"] = f"{sum(place['near'] for place in among)} of {len(among)}"
        summary["of what the sweep ran, the predicted first within 3 % of the published one's speed, or faster"] = equal
        summary["sweep"] = ranked(lists, limit)
    print(json.dumps(summary, indent=1))
    print(record.write("plan_search", {**summary, "rows": rows}))


def by_maker(runs: Sequence[Published], predictor: Predictor) -> dict[str, str]:
    """Of each trainer's runs, as many as are said to fit."""
    found: dict[str, list[bool]] = defaultdict(list)
    for run in runs:
        if run.maker in ("megatron", "nanotron", "torchtitan"):
            found[run.maker].append(said_to_fit(run, trainer_of(run, predictor)))
    return {maker: f"{sum(fits)} of {len(fits)}" for maker, fits in sorted(found.items())}


if __name__ == "__main__":
    main()
