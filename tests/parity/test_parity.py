"""Any layout of ranks computes what one process computes. `make parity` runs them all, this a covering few."""

from __future__ import annotations

from parity.cases import all_layouts, covering
from parity.worker import sweep, verdicts
from ranks import run_ranks

TOLERANCE = 1e-10


def test_a_covering_of_all_layouts() -> None:
    cases = covering(all_layouts(), 30)
    results = verdicts(cases, run_ranks(sweep, 8, cases, timeout=280))
    problems = [result.problem(TOLERANCE) for result in results]
    assert not any(problems), "\n".join(filter(None, problems))
