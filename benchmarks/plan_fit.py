"""Fit of the planner's constants to published runs, and predictions of runs by any constants.

A constant has a physical meaning and a range; its distance from what was known before counts as a run that is as far off. Runs of
one source, model, GPU and precision count together as the square root of their number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from published import Published
from scipy.optimize import least_squares

from mega_trainer.plan import machine as machines
from mega_trainer.plan.kernel_throughput import GpuThroughput
from mega_trainer.plan.machine import Interconnect, MachineEfficiency
from mega_trainer.plan.step_time import PlannedRun


@dataclass(frozen=True)
class Constant:
    """A constant's value before any fit, and its range; `large` are Hopper and Blackwell.

    Not fitted: `network`, `link`, `hop` and `contention`, which are benchmarks/predict.py's; `memory` and `kernel`, which are
    benchmarks/traffic.py's; attention on Ampere, by arXiv:2307.08691, and FlashAttention-2's on Hopper, by arXiv:2407.08608.
    """

    before: float
    least: float
    most: float


CONSTANTS = {
    "ampere.bf16": Constant(0.85, 0.5, 1.0), "ampere.triton": Constant(0.35, 0.1, 0.6),
    "large.bf16": Constant(0.75, 0.4, 1.0), "hopper.fp8": Constant(0.7, 0.3, 1.0),
    "blackwell.fp8": Constant(0.65, 0.3, 1.0), "blackwell.nvfp4": Constant(0.5, 0.2, 1.0),
    "hopper.attention": Constant(0.5, 0.2, 0.8), "blackwell.attention": Constant(0.45, 0.2, 0.8),
    "hopper.triton": Constant(0.2, 0.05, 0.5), "all.grouped": Constant(0.8, 0.3, 1.0),
    "all.exchange": Constant(0.7, 0.2, 1.0), "all.scan": Constant(0.07, 0.01, 0.5),  "hopper.power": Constant(0.8, 0.3, 1.5),
    "blackwell.power": Constant(0.8, 0.3, 1.5), "amd.bf16": Constant(0.45, 0.2, 1.0), "amd.fp8": Constant(0.35, 0.1, 1.0),
    "trainer.eager": Constant(2.0, 1.0, 4.0), "trainer.compiled": Constant(1.2, 1.0, 3.0),
    "trainer.host": Constant(8e-3, 1e-3, 2e-2), "trainer.stall": Constant(2e-3, 2e-4, 1e-2),
    "trainer.looped": Constant(2e-5, 2e-6, 2e-4),
    "trainer.fused": Constant(1.2, 1.0, 2.0), "trainer.interleaved": Constant(2.0, 1.0, 4.0),
}  # fmt: skip
GROUPS = {
    "amd": ("cdna3", "cdna4"),
    "large": ("hopper", "blackwell"),
    "all": ("ampere", "ada", "hopper", "blackwell", "cdna3", "cdna4"),
}
ROUNDS = 3  # of a fit: errors are taken as linear in the constants' logarithms, each time anew
PRIOR = 0.5  # what a constant's distance from what was known before weighs, beside a run that is as far off
Constants = Mapping[str, float]
Array = np.ndarray[Any, Any]


def own_constants(constants: Constants, generation: str) -> dict[str, float]:
    """Return the constants of one generation of GPUs by the field of `MachineEfficiency`."""
    named = [(name.partition("."), value) for name, value in constants.items()]
    return {key: value for (group, _, key), value in named if generation in GROUPS.get(group, (group,))}


class Predictor:
    """Predicts runs for any constants. What a pipeline waits is simulated once, and taken as a share of its stages' work."""

    def __init__(self, runs: Sequence[Published], base: Mapping[str, MachineEfficiency]) -> None:
        self.runs, self.base = runs, base
        self.plans: dict[int, PlannedRun] = {}
        self.waits: dict[int, float] = {}
        self.known: dict[tuple[int, str], float] = {}  # seconds by run and the constants that concern it

    def planned(self, run: Published, constants: Constants) -> PlannedRun:
        """A run by those constants."""
        generation = run.machine.generation
        own = own_constants(constants, generation)
        profile, machine = run.profile, run.machine
        profile = replace(profile, passes=constants.get(f"trainer.{run.fusion}", profile.passes))
        assumed = {"host": profile.host, "stall": profile.stall, "looped": profile.looped}
        fitted = {name: constants.get(f"trainer.{name}", value) for name, value in assumed.items() if value}
        profile = replace(profile, **fitted)
        if (
            profile.hides_dispatch and profile.graphs < 1
        ):  # two micro-batches' layers are launched piece by piece in turn
            profile = replace(profile, host=profile.host * constants["trainer.interleaved"])
        efficiency = self.base[generation].model_copy(update=own)
        if id(run) not in self.plans:
            self.plans[id(run)] = PlannedRun.from_settings(run.model, run.run, machine, efficiency, profile)
        interconnect, rates = (
            Interconnect.from_machine(machine, efficiency),
            GpuThroughput.from_machine(machine, efficiency, profile.attention),
        )
        return replace(
            self.plans[id(run)],
            cost_model=replace(self.plans[id(run)].cost_model, interconnect=interconnect, rates=rates, profile=profile),
        )

    def seconds(self, run: Published, constants: Constants) -> float:
        """Of a step."""
        planned = self.planned(run, constants)
        cost_model = planned.cost_model
        key = id(run), repr((cost_model.interconnect, cost_model.rates, cost_model.profile))
        if key not in self.known:
            self.known[key] = self._predict_seconds(run, planned)
        return self.known[key]

    def _predict_seconds(self, run: Published, planned: PlannedRun) -> float:
        quick = planned.predict_minimum_time()
        busy = quick.seconds - quick.parts.get("pipeline bubble", 0.0)
        if run.run.pp == 1:
            return quick.seconds
        if id(run) not in self.waits:
            simulated = planned.predict_step_time()
            bubble = simulated.parts.get("pipeline bubble", 0.0)
            self.waits[id(run)] = bubble / (simulated.seconds - bubble)
        return busy * (1 + self.waits[id(run)])

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

    def fit(self, used: Array, weights: Array) -> dict[str, float]:
        """Return the constants that predict the runs of which `used` is true best, by these slopes."""
        ranges = [CONSTANTS[name] for name in self.names]
        before, least, most = (np.log([getattr(one, key) for one in ranges]) for key in ("before", "least", "most"))

        def residuals(logs: Array) -> Array:
            errors = weights[used] * (self.errors[used] + self.slopes[used] @ (logs - self.logs))
            return np.concatenate([errors, PRIOR * (logs - before)])

        start = np.clip(self.logs, least + 1e-6, most - 1e-6)
        found = least_squares(residuals, start, bounds=(least, most), loss="soft_l1", f_scale=0.05)
        return {name: float(f"{value:.3g}") for name, value in zip(self.names, np.exp(found.x), strict=True)}


def run_weights(runs: Sequence[Published]) -> Array:
    """Return what each run's error weighs in a fit: runs of one source, model, GPU and precision repeat each other."""

    def kind(run: Published) -> tuple[str, ...]:
        return run.source, run.row["model"], run.row["gpu"], run.run.precision

    count = Counter(map(kind, runs))
    return np.array([count[kind(run)] ** -0.25 for run in runs])


def fit_constants(predictor: Predictor) -> tuple[dict[str, float], Slopes]:
    """Return the constants that predict all runs best, and the slopes of errors there."""
    constants = {name: constant.before for name, constant in CONSTANTS.items()}
    every, weights = np.ones(len(predictor.runs), dtype=bool), run_weights(predictor.runs)
    for _ in range(ROUNDS):
        constants = Slopes.at(predictor, constants).fit(every, weights)
        print(constants, flush=True)
    return constants, Slopes.at(predictor, constants)


def write_efficiency(constants: Constants) -> None:
    """Write the constants of GPUs into efficiency.yaml of the planner."""
    path = Path(machines.__file__).parent / "efficiency.yaml"
    raw = yaml.safe_load(path.read_text())
    for generation, figures in raw.items():
        figures |= own_constants(constants, generation)
    head = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    path.write_text(head + yaml.safe_dump(raw, sort_keys=False, default_flow_style=None, width=400))
