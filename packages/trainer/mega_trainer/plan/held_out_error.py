"""Error of predicted step times on published runs that the fit had not used, by class of run.

A class is a GPU or its generation, the kind of model (dense, experts or hybrid) and the precision. `benchmarks/plan_time.py --fit`
writes the file: each published run is predicted by constants that were fitted without its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from mega_common.model_config import ModelConfig
from mega_common.strict_config import load_yaml_mapping
from mega_trainer.plan.machine import MachineSpec


@dataclass(frozen=True)
class HeldOutError:
    """Relative error of predicted step times for a class of published runs.

    Attributes:
        runs: number of runs of the class.
        median, p90: median and 90th percentile of the absolute relative error.
        of: class of runs, such as "hopper dense bf16".
    """

    runs: int
    median: float
    p90: float
    of: str

    def format_error(self) -> str:
        """Return the error as a short text."""
        return (
            f"half within {100 * self.median:.0f} %, 90 % within {100 * self.p90:.0f} % "
            f"({self.runs} published runs of other sources than the fit: {self.of})"
        )


def classify_model(model: ModelConfig) -> str:
    """Return the kind of a model whose error is reported: `hybrid` with recurrent layers, else `experts` or `dense`."""
    return "hybrid" if model.is_recurrent else "experts" if model.moe else "dense"


def find_held_out_error(model: ModelConfig, machine: MachineSpec, precision: str) -> HeldOutError | None:
    """Return the held-out error of the narrowest class with published runs, or None if no run of this kind of model on this
    generation of GPUs was published.
    """
    raw = load_yaml_mapping(Path(str(files(__package__ or "mega_trainer.plan") / "held_out_errors.yaml")))
    kind = classify_model(model)
    for name in (
        f"{machine.gpu} {kind} {precision}",
        f"{machine.generation} {kind} {precision}",
        f"{machine.generation} {kind}",
    ):
        if name in raw:
            found = raw[name]
            return HeldOutError(found["runs"], found["median_error"], found["p90_error"], name)
    return None


def describe_held_out_error(model: ModelConfig, machine: MachineSpec, precision: str) -> dict[str, object]:
    """Return the error of a prediction as `mega plan --json` prints it: `runs`, `median`, `p90` and `class`, or only `class` and
    `runs` = 0 without published runs.
    """
    found = find_held_out_error(model, machine, precision)
    if found is None:
        return {"class": f"{machine.generation} {classify_model(model)} {precision}", "runs": 0}
    return {"class": found.of, "runs": found.runs, "median": found.median, "p90": found.p90}


def format_held_out_error(error: dict[str, object]) -> str:
    """Return the error of `describe_held_out_error` as a line of text."""
    if not error["runs"]:
        return f"unknown: no run of this class ({error['class']}) was published"
    runs, median, p90 = (float(str(error[key])) for key in ("runs", "median", "p90"))
    return HeldOutError(int(runs), median, p90, str(error["class"])).format_error()
