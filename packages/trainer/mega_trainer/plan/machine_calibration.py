"""Calibration of a machine by a measured run: its efficiencies are scaled until predicted and measured times agree.

Lines of metrics.jsonl with phases tell two things apart, without them the whole step is taken for the first:

    forward, backward   products, attention, memory   the shares of their peaks, all by one factor
    reduce              sums over data ranks          `link` and `network`, by one factor
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mega_common.bounded_parsing import explain_read_error, parse_json_text, read_file_start
from mega_common.errors import ConfigError
from mega_trainer.plan.layer_cost import GpuThroughput
from mega_trainer.plan.machine import Interconnect, MachineEfficiency, MachineSpec
from mega_trainer.plan.step_time import PlannedRun

WARM_UP = 3  # steps at the beginning of a run that nothing is learnt from
FEWEST = 5  # lines that a median wants
COMPUTE = ("bf16", "fp8", "attention", "flash2", "triton", "memory")
FASTER = 1.1  # as long as at a machine's peak takes no run there
LEAST = 0.02  # of what a data sheet promises: less is no machine's doing
HALVINGS = 40
TOLD = 0.1  # of a step's time that a fitted machine leaves open, from which on that is said


@dataclass(frozen=True)
class MeasuredTimes:
    """Median seconds of a step, and of its phases by name if the run logged them."""

    seconds: float
    phases: Mapping[str, float]

    @property
    def compute_seconds(self) -> float:
        """Seconds of forward and backward; without phases those of the whole step."""
        return self.phases["forward"] + self.phases["backward"] if "forward" in self.phases else self.seconds


def read_measured_times(path: Path) -> MeasuredTimes:
    """Return the median times of a run's metrics.jsonl; steps that evaluate or save are left out if phases are logged.

    Raises:
        ConfigError: when it cannot be read, or too few steps are in it.
    """
    try:
        lines = [parse_json_text(line) for line in read_file_start(path).decode("utf-8").splitlines()]
        steps = [line for line in lines if line["step"] > WARM_UP and not _is_interrupted(line)]
        seconds = [float(line["seconds"]) for line in steps]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--fit {path}: no metrics of a run ({explain_read_error(error)})",
            hint="metrics.jsonl in the output folder of mega train",
        ) from error
    if len(steps) < FEWEST:
        rule = f"--fit {path}: {len(steps)} steps after the first {WARM_UP}, and {FEWEST} are wanted"
        raise ConfigError(rule, hint="train a few steps more")
    names = {name for line in steps for name in line if name.startswith("phases/")}
    medians = {name[7:]: statistics.median(float(line.get(name) or 0.0) for line in steps) for name in sorted(names)}
    return MeasuredTimes(statistics.median(seconds), medians)


def _is_interrupted(line: Mapping[str, object]) -> bool:
    """Return whether a step evaluated or saved."""
    return any(line.get(f"phases/{name}") for name in ("evaluate", "save"))


def calibrate_machine(planned: PlannedRun, machine: MachineSpec, measured: MeasuredTimes) -> MachineSpec:
    """Return the machine with efficiencies for which the planned run takes the measured time, as far as possible.

    Raises:
        ConfigError: when it took less than any share explains: another machine, or other ranks.
    """

    def predict_parts(efficiency: MachineEfficiency) -> dict[str, float]:
        wires, rates = (
            Interconnect.from_machine(machine, efficiency),
            GpuThroughput.from_machine(machine, efficiency, planned.bench.habits),
        )
        return replace(planned, bench=replace(planned.bench, wires=wires, rates=rates)).predict_minimum_time().parts

    def predict_compute(efficiency: MachineEfficiency) -> float:
        apart = ("pipeline bubble", "data", "optimizer") if "forward" in measured.phases else ()
        return sum(seconds for part, seconds in predict_parts(efficiency).items() if part not in apart)

    found = _scale_efficiency(machine.achieved_efficiency, COMPUTE, measured.compute_seconds, predict_compute)
    if predict_compute(found) > FASTER * measured.compute_seconds:
        rule = f"--fit: forward and backward took {measured.compute_seconds:.3g} s, and {predict_compute(found):.3g} s at the peak of {machine.gpu}"
        raise ConfigError(rule, hint="give the --machine and the --ranks of that run")
    if measured.phases.get("reduce") and predict_parts(found).get("data"):
        found = _scale_efficiency(
            found, ("link", "network"), measured.phases["reduce"], lambda e: predict_parts(e).get("data", 0.0)
        )
    return machine.model_copy(update={"efficiency": found})


def _scale_efficiency(
    shares: MachineEfficiency, names: tuple[str, ...], target: float, seconds: Callable[[MachineEfficiency], float]
) -> MachineEfficiency:
    """Return the efficiencies with those of `names` scaled by the factor for which `seconds`, which decrease with it,
    are closest to `target`.
    """

    def scale_shares(factor: float) -> MachineEfficiency:
        return shares.model_copy(update={name: getattr(shares, name) * factor for name in names})

    largest = 1 / max(getattr(shares, name) for name in names)
    low, high = LEAST / min(getattr(shares, name) for name in names), largest
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(scale_shares(middle)) > target else (low, middle)
    return shares.model_copy(update={name: round(getattr(shares, name) * high, 4) for name in names})


def compare_predictions(before: PlannedRun, after: PlannedRun, measured: MeasuredTimes) -> Iterator[str]:
    """Yield lines that compare predicted and measured times, before and after calibration."""
    was, now = before.predict_step_time(), after.predict_step_time()
    yield f"a step: measured {measured.seconds:.4g} s, predicted {was.seconds:.4g} s before and {now.seconds:.4g} s as fitted"
    if abs(now.seconds / measured.seconds - 1) > TOLD:
        yield "  the rest is none of its rates: latencies, the host, or other settings than the run's (take its own run.yaml)"
    for name, value in measured.phases.items():
        if value:
            yield f"  measured {name} {value:.4g} s"
