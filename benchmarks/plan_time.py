"""How right `mega plan` is about the time of a step: beside published runs, with its constants fitted on them.

    python benchmarks/plan_time.py RUNS.csv [--fit] [--cross-validate]

`--fit` fits the constants below, fourteen in all, to the runs by least squares of the logarithms (a run that is far off
counts less) and of what was known before, writes those of GPUs into mega_trainer/plan/efficiency.yaml, and prints those that describe other trainers for
`published.py`. `--cross-validate` fits without one source, or one family of models, and predicts that one. Results: errors by
source, family, GPU and precision; and pairs of runs that differ in one setting.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import record
import yaml
from published import Published, published
from scipy.optimize import least_squares

from mega_trainer.config.run_config import RunConfig
from mega_trainer.plan import machine as machines
from mega_trainer.plan.layer_cost import GpuThroughput
from mega_trainer.plan.layout_candidates import generate_layout_candidates
from mega_trainer.plan.machine import Interconnect, MachineEfficiency, load_efficiency
from mega_trainer.plan.other_trainer_memory import predict_other_trainer_memory
from mega_trainer.plan.step_time import PlannedRun

GOAL = ("A100-40GB", "A100-80GB", "H100", "H100-96GB-HBM2e-500W", "B200")
# Constants, and what they were before any fit; `large` are Hopper and Blackwell. Not fitted: `network`, `link`, `hop` and
# `contention`, which are benchmarks/predict.py's; `memory` and `kernel`, which are benchmarks/traffic.py's; attention on Ampere,
# by arXiv:2307.08691, and FlashAttention-2's on Hopper, by arXiv:2407.08608.
FITTED = {
    "ampere.bf16": 0.85, "ampere.triton": 0.35, "large.bf16": 0.75, "hopper.fp8": 0.7, "hopper.attention": 0.45,
    "hopper.triton": 0.2, "blackwell.fp8": 0.6, "blackwell.attention": 0.45, "all.grouped": 0.7, "all.exchange": 0.7,
    "trainer.eager": 2.0, "trainer.compiled": 1.2, "trainer.throttled": 0.8, "trainer.host": 8e-3,
}  # fmt: skip
GROUPS = {"large": ("hopper", "blackwell"), "all": ("ampere", "ada", "hopper", "blackwell")}
ROUNDS = 3  # of a fit: errors are taken as linear in the constants' logarithms, each time anew
PRIOR = 0.5  # what a constant's distance from what was known before weighs, beside a run that is as far off
TRAINERS = {
    "trainer.eager": 3.07,
    "trainer.compiled": 1.31,
    "trainer.throttled": 0.676,
    "trainer.host": 9.15e-3,
}  # as the last fit had them
Constants = Mapping[str, float]
Array = np.ndarray[Any, Any]


def _own(constants: Constants, generation: str) -> dict[str, float]:
    """Of one generation of GPUs."""
    named = [(name.partition("."), value) for name, value in constants.items()]
    return {key: value for (group, _, key), value in named if generation in GROUPS.get(group, (group,))}


class Predictor:
    """Predicts runs for any constants. What a pipeline waits is simulated once, and taken as a share of its stages' work."""

    def __init__(self, runs: Sequence[Published], base: Mapping[str, MachineEfficiency]) -> None:
        self.runs, self.base = runs, base
        self.plans: dict[int, PlannedRun] = {}
        self.waits: dict[int, float] = {}

    def planned(self, run: Published, constants: Constants) -> PlannedRun:
        """A run by those constants."""
        generation = run.machine.generation
        own = _own(constants, generation)
        profile, machine = run.profile, run.machine
        if profile.passes != 1:
            kind = "trainer.eager" if profile.passes >= 1.5 else "trainer.compiled"
            profile = replace(profile, passes=constants.get(kind, profile.passes))
        if profile.host:
            profile = replace(profile, host=constants.get("trainer.host", profile.host))
        if run.throttled and "trainer.throttled" in constants:
            peaks = {
                kind: machine.get_peak_flops(kind) / 1e12 * constants["trainer.throttled"] for kind in ("bf16", "fp8")
            }
            machine = machine.model_copy(update={"tflops": {**peaks}})
        efficiency = self.base[generation].model_copy(update=own)
        if id(run) not in self.plans:
            self.plans[id(run)] = PlannedRun.from_settings(run.model, run.run, machine, efficiency, profile)
        interconnect, rates = (
            Interconnect.from_machine(machine, efficiency),
            GpuThroughput.from_machine(machine, efficiency, profile),
        )
        return replace(
            self.plans[id(run)],
            cost_model=replace(self.plans[id(run)].cost_model, interconnect=interconnect, rates=rates, profile=profile),
        )

    def seconds(self, run: Published, constants: Constants) -> float:
        """Of a step."""
        planned = self.planned(run, constants)
        quick = planned.predict_minimum_time()
        waits = quick.parts.get("pipeline bubble", 0.0)
        if not waits:
            return quick.seconds
        if id(run) not in self.waits:
            self.waits[id(run)] = planned.predict_step_time().parts.get("pipeline bubble", 0.0) / waits
        return quick.seconds + waits * (self.waits[id(run)] - 1)

    def errors(self, constants: Constants, runs: Sequence[Published] | None = None) -> Array:
        """Logarithms of predicted over measured."""
        return np.array([math.log(self.seconds(run, constants) / run.seconds) for run in runs or self.runs])


@dataclass(frozen=True)
class Slopes:
    """Errors of all runs near some constants: at `logs` of the constants, and how they grow with each."""

    names: list[str]
    logs: Array
    errors: Array
    slopes: Array

    @classmethod
    def at(cls, predictor: Predictor, constants: Constants) -> Slopes:
        """Near those."""
        names, errors, step = list(constants), predictor.errors(constants), 0.02
        raised = [predictor.errors({**constants, name: constants[name] * math.exp(step)}) for name in names]
        logs = np.log([constants[name] for name in names])
        return cls(names, logs, errors, np.stack([(other - errors) / step for other in raised], axis=1))

    def fit(self, used: Array) -> dict[str, float]:
        """Constants that predict the runs of which `used` is true best, by these slopes."""
        before = np.log([FITTED[name] for name in self.names])

        def residuals(logs: Array) -> Array:
            errors = self.errors[used] + self.slopes[used] @ (logs - self.logs)
            return np.concatenate([errors, PRIOR * (logs - before)])

        top = [math.log(5.0) if name.startswith("trainer.") else 0.0 for name in self.names]
        found = least_squares(
            residuals, np.minimum(self.logs, np.array(top) - 1e-6), bounds=([math.log(0.001)] * len(top), top), loss="soft_l1",
            f_scale=0.05,
        )  # fmt: skip
        return {name: float(f"{value:.3g}") for name, value in zip(self.names, np.exp(found.x), strict=True)}


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
MARGIN = 0.01  # of a rate: runs that are nearer to each other than that tell no sign


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
    things. The source does not tell that layout: tensor ranks are let on two nodes, as few samples ask for.
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
        held = max(sum(kinds.values()) for kinds in predict_other_trainer_memory(run.model, layout.run, "megatron"))
        best = layout.predict_step_time().seconds if held <= run.machine.usable_memory_bytes else best
    return best


def context_pairs(
    runs: Sequence[Published], predictor: Predictor, constants: Constants
) -> Iterator[tuple[str, float, float]]:
    """Of runs under context parallelism whose source tells the best without it: what it gains, measured and predicted."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--cross-validate", action="store_true")
    options = parser.parse_args()
    runs = list(published(options.runs))
    predictor = Predictor(runs, load_efficiency())
    constants: dict[str, float] = dict(FITTED)
    every = np.ones(len(runs), dtype=bool)
    if options.fit:
        for _ in range(ROUNDS):
            constants = Slopes.at(predictor, constants).fit(every)
            print(constants, flush=True)
        _write(constants)
        predictor = Predictor(runs, load_efficiency())
    trainers = (
        {name: value for name, value in constants.items() if name.startswith("trainer.")} if options.fit else TRAINERS
    )
    errors = predictor.errors(trainers)
    goal = [run.row["gpu"] in GOAL for run in runs]
    mine = [run for run, counts in zip(runs, goal, strict=True) if counts]
    results: dict[str, Any] = {
        "constants": constants if options.fit else None,
        "A100, H100 and B200": told([error for error, counts in zip(errors, goal, strict=True) if counts]),
        "all": told(errors),
        "by source": by(lambda run: run.source, runs, errors),
        "by family": by(lambda run: run.family, runs, errors),
        "by gpu": by(lambda run: run.row["gpu"], runs, errors),
        "by precision": by(lambda run: run.run.precision, runs, errors),
        "by kind": by(lambda run: "experts" if run.mixture else "dense", runs, errors),
    }
    tuned = list(published(options.runs, tuned=True))
    results["fine-tuning, of which nothing is fitted"] = by(
        lambda run: "adapters" if run.run.lora else "all weights",
        tuned,
        Predictor(tuned, load_efficiency()).errors(trainers),
    )
    for name, scaled in (("pairs", False), ("pairs on other numbers of GPUs", True)):
        found = [
            (setting, math.log(other.rate / one.rate),
             math.log(other.rate * other.seconds / one.rate / one.seconds
                      * predictor.seconds(one, trainers) / predictor.seconds(other, trainers)))
            for setting, one, other in pairs(mine, scaled=scaled)
        ]  # fmt: skip
        found += [] if scaled else context_pairs(mine, predictor, trainers)
        each = {setting: judged([d for d in found if d[0] == setting]) for setting in SETTINGS}
        results[name] = {"all": judged(found), **{key: value for key, value in each.items() if value["pairs"]}}
    if options.cross_validate:
        results["cross-validated"] = crossed(predictor, runs, Slopes.at(predictor, constants))
    for name, value in results.items():
        print(name, yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=150), sep=": ")
    print(record.write("plan_time", results, ["scipy", "numpy"]))


def crossed(predictor: Predictor, runs: Sequence[Published], slopes: Slopes) -> dict[str, Any]:
    """Each source and each family predicted by constants that were fitted without it."""
    table: dict[str, Any] = {}
    for kind in ("source", "family"):
        every: list[float] = []
        for left_out in sorted({str(getattr(run, kind)) for run in runs}):
            used = np.array([getattr(run, kind) != left_out for run in runs])
            tested = [run for run, kept in zip(runs, used, strict=True) if not kept]
            errors = predictor.errors(slopes.fit(used), tested)
            table[f"{kind} {left_out}"] = told(errors)
            every += [error for run, error in zip(tested, errors, strict=True) if run.row["gpu"] in GOAL]
        table[f"each {kind} by the others, on A100, H100 and B200"] = told(every)
    return table


def _write(constants: Constants) -> None:
    path = Path(machines.__file__).parent / "efficiency.yaml"
    raw = yaml.safe_load(path.read_text())
    for generation, figures in raw.items():
        figures |= _own(constants, generation)
    head = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    path.write_text(head + yaml.safe_dump(raw, sort_keys=False, default_flow_style=None, width=200))


if __name__ == "__main__":
    main()
