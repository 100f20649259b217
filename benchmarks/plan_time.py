"""How right `mega plan` is about the time of a step: beside published runs, by constants fitted on them and on others.

    python benchmarks/plan_time.py RUNS.csv [RUNS.csv ...] [--fit] [--worst 30]

Every error is printed twice: of the constants fitted on all runs, and held out: each source, each model and each machine is
predicted by constants fitted without its runs. The planner quotes errors of held-out sources. `--fit` writes the constants of GPUs
into mega_trainer/plan/efficiency.yaml and the held-out errors of each class of runs into mega_trainer/plan/held_out_errors.yaml;
those of other trainers are printed. `--worst` lists the runs that are furthest off. benchmarks/published/runs.csv
has public runs of Megatron-Bridge's documents.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import record
import yaml
from plan_fit import Array, Constants, Predictor, Slopes, fit_constants, run_weights, write_efficiency
from published import Published, published

from mega_trainer.config.run_config import RunConfig
from mega_trainer.plan import machine as machines
from mega_trainer.plan.device_memory import add_non_tensor_memory
from mega_trainer.plan.layout_candidates import generate_layout_candidates
from mega_trainer.plan.machine import load_default_efficiencies
from mega_trainer.plan.other_trainer_memory import predict_other_trainer_memory
from mega_trainer.plan.step_time import PlannedRun

GOAL = ("A100-40GB", "A100-80GB", "H100", "H100-96GB-HBM2e-500W", "B200")
LEAST_RUNS = 3  # of a class whose error is written


def told(errors: Sequence[float] | Array) -> dict[str, float]:
    """Of logarithms of ratios: how many, the middle and the 90th percentile of the relative error, and the median's sign."""
    relative = np.expm1(np.asarray(errors))
    sizes = np.abs(relative)
    return {
        "runs": len(sizes), "median_error": round(float(np.median(sizes)), 4),
        "p90_error": round(float(np.quantile(sizes, 0.9)), 4), "bias": round(float(np.median(relative)), 4),
    }  # fmt: skip


def by(key: Callable[[Published], str], runs: Sequence[Published], errors: Array) -> dict[str, dict[str, float]]:
    """`told` of each group."""
    groups: dict[str, list[float]] = defaultdict(list)
    for run, error in zip(runs, errors, strict=True):
        groups[key(run)].append(float(error))
    return {name: told(group) for name, group in sorted(groups.items())}


SETTINGS = ("tp", "pp", "virtual_stages", "cp", "ep", "micro_batch", "precision", "recompute")
MARGIN = 0.01  # of a rate: runs that are nearer to each other than that show no sign


def pairs(runs: Sequence[Published], *, scaled: bool = False) -> Iterator[tuple[str, Published, Published]]:
    """Runs of one source, model and kind of GPU that differ in one setting: on as many GPUs with the same batch, or `scaled`,
    with other numbers of both.
    """
    for one, other in itertools.combinations(runs, 2):
        size = one.gpus == other.gpus and one.row["global_batch"] == other.row["global_batch"]
        differing = [name for name in SETTINGS if getattr(one.run, name) != getattr(other.run, name)]
        told = abs(math.log(one.rate / other.rate)) > MARGIN
        if _alike(one) == _alike(other) and size is not scaled and len(differing) == 1 and told:
            yield differing[0], one, other


def _alike(run: Published) -> tuple[str, ...]:
    """What two runs of a pair have in common."""
    release = run.row["source"].partition(" Pre-Training")[0] if "Bridge" in run.source else run.source
    recipe = "finer" if "in parentheses" in run.row["source"] else ""
    return (release, recipe, *(run.row[name] for name in ("source_path_or_url", "model", "layers", "seq", "gpu")))


def without_context(run: Published, predictor: Predictor, constants: Constants) -> float:
    """Seconds of a step without context parallelism, in the layout that is predicted best of those that fit as Megatron keeps
    things. The source does not state that layout: tensor ranks are let on two nodes, as few samples ask for.
    """
    planned, shape = predictor.planned(run, constants), run.run
    wider = run.machine.model_copy(update={"ranks_per_node": 2 * run.machine.ranks_per_node})
    batch = shape.micro_batch * shape.microbatches * shape.dp
    config = RunConfig.parse(
        {
            "model": run.model.model_dump(mode="json", exclude_none=True), "precision": shape.precision,
            "data": {"train": ["none"], "seq_length": shape.seq_length}, "batch": {"global": batch},
        }
    )  # fmt: skip
    layouts = [
        replace(planned, run=other, cost_model=replace(planned.cost_model, run=other))
        for _, other in generate_layout_candidates(config, run.gpus, wider)
        if (other.cp, other.zero, other.schedule) == (1, 1, "1f1b") and other.recompute in ("none", "full")
    ]
    best = math.inf
    for layout in sorted(layouts, key=PlannedRun.estimate_minimum_seconds):
        if layout.estimate_minimum_seconds() >= best:
            break
        kept = predict_other_trainer_memory(run.model, layout.run, "megatron")
        held = max(sum(add_non_tensor_memory(layout.run, kinds).values()) for kinds in kept)
        best = layout.predict_step_time().seconds if held <= run.machine.usable_memory_bytes else best
    return best


def context_pairs(
    runs: Sequence[Published], predictor: Predictor, constants: Constants
) -> Iterator[tuple[str, float, float]]:
    """Of runs under context parallelism whose source states the best without it: what it gains, measured and predicted."""
    for run in runs:
        told = re.search(r"no-CP best ([\d.]+) TF", run.row["source"])
        if told and run.run.cp > 1:
            gain = predictor.planned(run, constants).predict_step_time().seconds
            yield (
                "cp",
                math.log(float(run.row["tflops_per_gpu"]) / float(told[1])),
                math.log(without_context(run, predictor, constants) / gain),
            )


def judged(found: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """Of pairs, as the logarithms of their measured and predicted ratios: right signs, and sizes within a third."""
    right = [(m, p) for _, m, p in found if m * p > 0]
    close = [1 for m, p in right if abs(math.expm1(abs(p)) - math.expm1(abs(m))) <= math.expm1(abs(m)) / 3]
    return {"pairs": len(found), "sign_right": len(right), "size_within_a_third": len(close)}


# What is left out together, and the classes whose errors are printed.
HELD_OUT: dict[str, Callable[[Published], str]] = {
    "source": lambda run: run.source,
    "model": lambda run: run.row["model"].split()[0],
    "machine": lambda run: run.row["gpu"],
}
CLASSES: dict[str, Callable[[Published], str]] = {
    "kind": lambda run: run.kind,
    "machine": lambda run: run.row["gpu"],
    "precision": lambda run: run.run.precision,
    "generation and kind": lambda run: f"{run.machine.generation} {run.kind}",
    "source": lambda run: run.source,
}


def held_out_errors(predictor: Predictor, slopes: Slopes, key: Callable[[Published], str]) -> Array:
    """Return the logarithms of predicted over measured times, each run by constants fitted without the runs of its key."""
    runs, weights, errors = predictor.runs, run_weights(predictor.runs), np.zeros(len(predictor.runs))
    keys = np.array([key(run) for run in runs])
    for left_out in sorted(set(keys)):
        tested = keys == left_out
        constants = slopes.fit(~tested, weights)
        errors[tested] = predictor.errors(constants, [run for run, one in zip(runs, tested, strict=True) if one])
    return errors


def print_worst(runs: Sequence[Published], errors: Array, count: int) -> None:
    """Print the runs that are furthest off."""
    for index in sorted(range(len(runs)), key=lambda i: -abs(errors[i]))[:count]:
        run, row = runs[index], runs[index].row
        layout = " ".join(
            f"{name} {row[name]}" for name in ("tp", "pp", "vpp", "cp", "ep", "micro_batch", "global_batch")
        )
        print(f"{math.expm1(errors[index]):+7.1%}  {row['model']} {row['gpu']} x {row['gpus']}, {run.run.precision}, {layout}, "
              f"{row['source'][:48]}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--worst", type=int, default=0, metavar="COUNT")
    options = parser.parse_args()
    runs = [run for path in options.runs for run in published(path)]
    predictor = Predictor(runs, load_default_efficiencies())
    constants, slopes = fit_constants(predictor)
    fitted = predictor.errors(constants)
    held_out = {name: held_out_errors(predictor, slopes, key) for name, key in HELD_OUT.items()}
    results: dict[str, Any] = {"constants": constants, "all runs, fitted": told(fitted)}
    for name, errors in held_out.items():
        results[f"all runs, held-out {name}"] = told(errors)
    for name, key in CLASSES.items():
        fits, out = by(key, runs, fitted), by(key, runs, held_out["machine" if name == "machine" else "source"])
        results[f"by {name}"] = {group: {"fitted": fits[group], "held out": out[group]} for group in fits}
    results["by kind, held-out model"] = by(lambda run: run.kind, runs, held_out["model"])
    results |= _compare_settings(runs, predictor, constants)
    tuned = [run for path in options.runs for run in published(path, tuned=True)]
    apart = Predictor(tuned, load_default_efficiencies()).errors(constants)
    results["fine-tuning, of which nothing is fitted"] = {
        "together": told(apart), **by(lambda run: run.kind, tuned, apart),
        **by(lambda run: f"{run.machine.generation} {run.kind}", tuned, apart),
        **by(lambda run: "adapters" if run.run.lora else "all weights", tuned, apart),
        **by(lambda run: f"{run.machine.generation}, {'adapters' if run.run.lora else 'all weights'}", tuned, apart),
    }  # fmt: skip
    if options.fit:
        write_efficiency(constants)
        _write_errors(runs, held_out["source"])
    for name, value in results.items():
        print(name, yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=150), sep=": ")
    print_worst(runs, held_out["source"], options.worst)
    print(record.write("plan_time", results, ["scipy", "numpy"]))


def _compare_settings(runs: Sequence[Published], predictor: Predictor, constants: Constants) -> dict[str, Any]:
    """Return how many pairs of runs that differ in one setting are predicted right."""
    mine, results = [run for run in runs if run.row["gpu"] in GOAL], {}
    for name, scaled in (("pairs", False), ("pairs on other numbers of GPUs", True)):
        found = [
            (setting, math.log(other.rate / one.rate),
             math.log(other.rate * other.seconds / one.rate / one.seconds
                      * predictor.seconds(one, constants) / predictor.seconds(other, constants)))
            for setting, one, other in pairs(mine, scaled=scaled)
        ]  # fmt: skip
        found += [] if scaled else context_pairs(mine, predictor, constants)
        each = {setting: judged([d for d in found if d[0] == setting]) for setting in SETTINGS}
        results[name] = {"all": judged(found), **{key: value for key, value in each.items() if value["pairs"]}}
    return results


def _write_errors(runs: Sequence[Published], errors: Array) -> None:
    """Write the held-out errors of each class of runs: generation of GPUs, class of model and precision."""
    classes: dict[str, dict[str, float]] = {}
    keys: Sequence[Callable[[Published], str]] = (
        lambda run: f"{run.machine.generation} {run.kind} {run.run.precision}",
        lambda run: f"{run.machine.generation} {run.kind}",
        lambda run: run.kind,
    )
    for key in keys:
        classes |= {name: value for name, value in by(key, runs, errors).items() if value["runs"] >= LEAST_RUNS}
    path = Path(machines.__file__).parent / "held_out_errors.yaml"
    head = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    path.write_text(head + yaml.safe_dump(classes, sort_keys=False, default_flow_style=None, width=150))


if __name__ == "__main__":
    main()
