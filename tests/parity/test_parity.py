"""Any layout of ranks computes what one process computes. `make parity` runs them all, this a covering few."""

from __future__ import annotations

from dataclasses import replace

from parity.cases import Case, all_layouts, covering
from parity.worker import sweep, verdicts
from ranks import run_ranks


def problems(cases: list[Case], ranks: int, tolerance: float) -> str:
    """What is wrong with each case that does not agree with one process."""
    results = verdicts(cases, run_ranks(sweep, ranks, cases, timeout=280))
    return "\n".join(filter(None, (result.problem(tolerance) for result in results)))


def test_a_covering_of_all_layouts() -> None:
    assert not problems(covering(all_layouts(), 40), 8, 1e-10)


def test_in_fp32() -> None:
    """Where single precision can tell: not of `tied`, whose key bias no softmax sees, so that its gradient is zero but
    for rounding, nor of Muon and many layers, which multiply rounding."""
    small = [
        case
        for case in all_layouts()
        if case.ranks <= 4 and case.model["num_layers"] < 4 and case.optimizer == "adamw" and case.name != "tied"
    ]
    cases = [replace(case, precision="fp32") for case in covering(small, 8)]
    assert not problems(cases, 4, 1e-5)
