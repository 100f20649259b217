"""Any layout of ranks computes what one process computes. `make parity` runs them all, this a covering few."""

from __future__ import annotations

from dataclasses import replace

from parity.cases import Case, all_layouts, covering
from parity.worker import Verdict, sweep, verdicts
from ranks import run_ranks


def results(cases: list[Case], ranks: int) -> list[Verdict]:
    """Each case against one process."""
    return verdicts(cases, run_ranks(sweep, ranks, cases, timeout=280))


def test_a_covering_of_all_layouts() -> None:
    assert not [problem for one in results(covering(all_layouts(), 40), 8) if (problem := one.problem(1e-10))]


def test_in_fp32() -> None:
    """Not of `tied`, whose key bias no softmax sees, so that its gradient is zero but for rounding; and what was divided
    by the root of a small moment, or went through Muon's iteration, has its rounding multiplied."""
    small = [case for case in all_layouts() if case.ranks <= 4 and case.name != "tied"]
    for one in results([replace(case, precision="fp32") for case in covering(small, 8)], 4):
        first = {kind: one.errors[kind] for kind in ("loss", "norm", "gradients")}
        assert not replace(one, errors=first).problem(1e-5)
        assert not one.problem(1e-4)
