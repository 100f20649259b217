"""Calibration of a machine by a measured run: its efficiencies are scaled until predicted and measured times agree.

Phases in metrics.jsonl separate compute and communication; without phases the whole step counts as compute:

    forward, backward   GEMMs, attention, memory        scale the shares of their peaks by one factor
    reduce              all-reduces over data ranks     scale `link` and `network` by one factor
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mega_common.bounded_parsing import explain_read_error, parse_json_text, read_file_start
from mega_common.errors import ConfigError
from mega_trainer.plan.kernel_throughput import GpuThroughput
from mega_trainer.plan.machine import Interconnect, MachineEfficiency, MachineSpec
from mega_trainer.plan.step_time import PlannedRun

WARM_UP = 3  # first steps of a run, which are ignored
MIN_STEPS = 5  # for the median
COMPUTE = ("bf16", "fp8", "nvfp4", "attention", "flash2", "triton", "scan", "memory")
PEAK_TOLERANCE = 1.1  # largest ratio of the time at the machine's peak to the measured time
MIN_SHARE = 0.02  # smallest plausible share of a data sheet figure
BISECTIONS = 40
REPORTED_ERROR = 0.1  # smallest relative error of the fitted step time that is reported


@dataclass(frozen=True)
class MeasuredTimes:
    """Measured median seconds of a run's step, and of the phases of a step by name if the run logged them."""

    seconds: float
    phases: Mapping[str, float]

    @property
    def forward_backward_seconds(self) -> float:
        """Measured seconds of forward and backward of a step, or of the whole step if no phases were logged."""
        return self.phases["forward"] + self.phases["backward"] if "forward" in self.phases else self.seconds


def read_measured_times(path: Path) -> MeasuredTimes:
    """Return the median step and phase times from a run's metrics.jsonl.
    Steps that evaluate or save are left out if phases are logged.

    Raises:
        ConfigError: when the file cannot be read or has too few steps.
    """
    try:
        lines = [parse_json_text(line) for line in read_file_start(path).decode("utf-8").splitlines()]
        steps = [line for line in lines if line["step"] > WARM_UP and not _is_interrupted(line)]
        seconds = [float(line["seconds"]) for line in steps]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--fit {path}: the file has no metrics of a run ({explain_read_error(error)})",
            hint="use metrics.jsonl in the output folder of mega train",
        ) from error
    if len(steps) < MIN_STEPS:
        message = f"--fit {path} requires {MIN_STEPS} steps after the first {WARM_UP}, but has {len(steps)}"
        raise ConfigError(message, hint=f"train at least {WARM_UP + MIN_STEPS} steps")
    names = {name for line in steps for name in line if name.startswith("phases/")}
    medians = {name[7:]: statistics.median(float(line.get(name) or 0.0) for line in steps) for name in sorted(names)}
    return MeasuredTimes(statistics.median(seconds), medians)


def _is_interrupted(line: Mapping[str, object]) -> bool:
    """Return whether a step evaluated or saved."""
    return any(line.get(f"phases/{name}") for name in ("evaluate", "save"))


def fit_machine_efficiency(planned: PlannedRun, machine: MachineSpec, measured: MeasuredTimes) -> MachineSpec:
    """Return the machine with efficiencies that bring the predicted time of a run as close as possible to the measured.

    Raises:
        ConfigError: when the measured time is shorter than at the machine's peak, as of another machine or number of ranks.
    """

    def predict_parts(efficiency: MachineEfficiency) -> dict[str, float]:
        interconnect, rates = (
            Interconnect.from_machine(machine, efficiency),
            GpuThroughput.from_machine(machine, efficiency, planned.cost_model.profile.attention),
        )
        return (
            replace(planned, cost_model=replace(planned.cost_model, interconnect=interconnect, rates=rates))
            .predict_minimum_time()
            .parts
        )

    def predict_compute(efficiency: MachineEfficiency) -> float:
        excluded = ("pipeline bubble", "data", "optimizer") if "forward" in measured.phases else ()
        return sum(seconds for part, seconds in predict_parts(efficiency).items() if part not in excluded)

    found = _scale_efficiency(machine.achieved_efficiency, COMPUTE, measured.forward_backward_seconds, predict_compute)
    if (at_peak := predict_compute(found)) > PEAK_TOLERANCE * measured.forward_backward_seconds:
        message = (
            f"--fit: forward and backward of the run took {measured.forward_backward_seconds:.3g} s, "
            f"but take at least {at_peak:.3g} s at the peak of {machine.gpu}"
        )
        raise ConfigError(message, hint="pass the --machine and --ranks of that run")
    if measured.phases.get("reduce") and predict_parts(found).get("data"):
        found = _scale_efficiency(
            found, ("link", "network"), measured.phases["reduce"], lambda e: predict_parts(e).get("data", 0.0)
        )
    return machine.model_copy(update={"efficiency": found})


def _scale_efficiency(
    shares: MachineEfficiency, names: tuple[str, ...], target: float, seconds: Callable[[MachineEfficiency], float]
) -> MachineEfficiency:
    """Return the efficiencies with the fields `names` scaled by the factor for which `seconds`, which decrease with it,
    are closest to `target`.
    """

    def scale_shares(factor: float) -> MachineEfficiency:
        return shares.model_copy(update={name: getattr(shares, name) * factor for name in names})

    highest = max(getattr(shares, name) for name in names)
    low, high = MIN_SHARE / highest, 1 / highest
    for _ in range(BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(scale_shares(middle)) > target else (low, middle)
    return shares.model_copy(update={name: round(getattr(shares, name) * high, 6) for name in names})


def format_calibration_comparison(before: PlannedRun, after: PlannedRun, measured: MeasuredTimes) -> Iterator[str]:
    """Yield lines of text that compare predicted and measured times before and after a machine's calibration."""
    old, new = before.predict_step_time().seconds, after.predict_step_time().seconds
    yield f"step time: measured {measured.seconds:.4g} s, predicted {old:.4g} s before and {new:.4g} s after the fit"
    if abs(new / measured.seconds - 1) > REPORTED_ERROR:
        yield "  rates do not explain the rest: check latencies, host time, and that run.yaml is that of the run"
    for name, value in measured.phases.items():
        if value:
            yield f"  measured {name} {value:.4g} s"
