"""Error of predicted step times on published runs that the fit had not used, by class of run.

A class is a GPU or its generation, the kind of model (dense, experts or hybrid) and the precision. `benchmarks/plan_time.py --fit`
writes the file: each published run is predicted by constants that were fitted without its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_common.model_config import ModelConfig
from mega_trainer.plan.machine import MachineSpec, load_plan_table


def classify_architecture(model: ModelConfig) -> str:
    """Return the kind of a model whose error is reported: `hybrid` with recurrent layers, else `experts` or `dense`."""
    return "hybrid" if model.is_recurrent else "experts" if model.moe else "dense"


def describe_prediction_error(model: ModelConfig, machine: MachineSpec, precision: str) -> dict[str, object]:
    """Return `class`, `runs`, `median` and `p90` of the error of predicted step times of similar published runs.
    The runs form the narrowest class with published runs; `median` and 90th percentile `p90` are of the absolute relative
    error. There are only `class` and `runs` = 0 if no run of this kind of model on this generation of GPUs was published.
    """
    raw = load_plan_table("held_out_errors.yaml")
    kind = classify_architecture(model)
    names = [f"{of} {kind} {precision}" for of in (machine.gpu, machine.generation)]
    for name in (*names, f"{machine.generation} {kind}"):
        if found := raw.get(name):
            return {"class": name, "runs": found["runs"], "median": found["median_error"], "p90": found["p90_error"]}
    return {"class": names[-1], "runs": 0}


def format_prediction_error(error: Mapping[str, Any]) -> str:
    """Return the error of step-time predictions as a line of text.
    `error` is the result of `describe_prediction_error`.
    """
    if not error["runs"]:
        return f"unknown: no run of this class ({error['class']}) was published"
    return (
        f"half within {100 * error['median']:.0f} %, 90 % within {100 * error['p90']:.0f} % "
        f"({error['runs']} published runs of other sources than the fit: {error['class']})"
    )
