"""A machine as a run of ours measured it: shares of its data sheet's figures, corrected until the plan takes as long.

Lines of metrics.jsonl with phases tell two things apart, without them the whole step is taken for the first:

    forward, backward   products, attention, memory   the shares of their peaks, all by one factor
    reduce              sums over data ranks          `link` and `network`, by one factor
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mega_common.errors import ConfigError
from mega_common.parsing import parse_json
from mega_trainer.plan.collectives import Wires
from mega_trainer.plan.machine import Efficiency, Machine
from mega_trainer.plan.step_time import Planned
from mega_trainer.plan.work import Rates

WARM_UP = 3  # steps at the beginning of a run that nothing is learnt from
FEWEST = 5  # lines that a median wants
COMPUTE = ("bf16", "fp8", "attention", "flash2", "triton", "memory")
FASTER = 1.1  # as long as at a machine's peak takes no run there
LEAST = 0.02  # of what a data sheet promises: less is no machine's doing
HALVINGS = 40
TOLD = 0.1  # of a step's time that a fitted machine leaves open, from which on that is said


@dataclass(frozen=True)
class Measured:
    """Medians in seconds: of a step, and of its phases by name where the run told them."""

    seconds: float
    phases: Mapping[str, float]

    @property
    def compute(self) -> float:
        """Forward and backward; without phases the whole step."""
        return self.phases["forward"] + self.phases["backward"] if "forward" in self.phases else self.seconds


def read_metrics(path: Path) -> Measured:
    """What a run's metrics.jsonl tells of its steps. Those that evaluate or save are left out where phases tell.

    Raises:
        ConfigError: when it cannot be read, or too few steps are in it.
    """
    try:
        lines = [parse_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
        steps = [line for line in lines if line["step"] > WARM_UP and not _interrupted(line)]
        seconds = [float(line["seconds"]) for line in steps]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--fit {path}: no metrics of a run ({error})", hint="metrics.jsonl in the output folder of mega train"
        ) from error
    if len(steps) < FEWEST:
        rule = f"--fit {path}: {len(steps)} steps after the first {WARM_UP}, and {FEWEST} are wanted"
        raise ConfigError(rule, hint="train a few steps more")
    names = {name for line in steps for name in line if name.startswith("phases/")}
    medians = {name[7:]: statistics.median(float(line.get(name) or 0.0) for line in steps) for name in sorted(names)}
    return Measured(statistics.median(seconds), medians)


def _interrupted(line: Mapping[str, object]) -> bool:
    return any(line.get(f"phases/{name}") for name in ("evaluate", "save"))


def fitted(planned: Planned, machine: Machine, measured: Measured) -> Machine:
    """The machine by whose figures the planned run takes as long as was measured, as far as shares of a data sheet can say.

    Raises:
        ConfigError: when it took less than any share explains: another machine, or other ranks.
    """

    def parts(efficiency: Efficiency) -> dict[str, float]:
        wires, rates = Wires.of(machine, efficiency), Rates.of(machine, efficiency, planned.bench.habits)
        return replace(planned, bench=replace(planned.bench, wires=wires, rates=rates)).time_at_least().parts

    def compute(efficiency: Efficiency) -> float:
        apart = ("pipeline bubble", "data", "optimizer") if "forward" in measured.phases else ()
        return sum(seconds for part, seconds in parts(efficiency).items() if part not in apart)

    found = _corrected(machine.reached, COMPUTE, measured.compute, compute)
    if compute(found) > FASTER * measured.compute:
        rule = f"--fit: forward and backward took {measured.compute:.3g} s, and {compute(found):.3g} s at the peak of {machine.gpu}"
        raise ConfigError(rule, hint="give the --machine and the --ranks of that run")
    if measured.phases.get("reduce") and parts(found).get("data"):
        found = _corrected(found, ("link", "network"), measured.phases["reduce"], lambda e: parts(e).get("data", 0.0))
    return machine.model_copy(update={"efficiency": found})


def _corrected(
    shares: Efficiency, names: tuple[str, ...], target: float, seconds: Callable[[Efficiency], float]
) -> Efficiency:
    """The shares with those of some names times the factor under which `seconds`, which fall as it grows, are nearest `target`."""

    def times(factor: float) -> Efficiency:
        return shares.model_copy(update={name: getattr(shares, name) * factor for name in names})

    largest = 1 / max(getattr(shares, name) for name in names)
    low, high = LEAST / min(getattr(shares, name) for name in names), largest
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(times(middle)) > target else (low, middle)
    return shares.model_copy(update={name: round(getattr(shares, name) * high, 4) for name in names})


def compared(before: Planned, after: Planned, measured: Measured) -> Iterator[str]:
    """Lines that tell predicted beside measured, by the machine as it was and as it is fitted."""
    was, now = before.time(), after.time()
    yield f"a step: measured {measured.seconds:.4g} s, predicted {was.seconds:.4g} s before and {now.seconds:.4g} s as fitted"
    if abs(now.seconds / measured.seconds - 1) > TOLD:
        yield "  the rest is none of its rates: latencies, the host, or other settings than the run's (take its own run.yaml)"
    for name, value in measured.phases.items():
        if value:
            yield f"  measured {name} {value:.4g} s"
