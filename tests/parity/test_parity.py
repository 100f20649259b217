"""Any layout of ranks computes what one process computes. `make parity` runs them all, this a covering few."""

from __future__ import annotations

from dataclasses import replace

from parity.cases import Case, all_layouts, case, covering
from parity.worker import sweep, verdicts
from ranks import run_ranks


def problems(cases: list[Case], ranks: int, tolerance: float) -> str:
    """What is wrong with each case that does not agree with one process."""
    results = verdicts(cases, run_ranks(sweep, ranks, cases, timeout=280))
    return "\n".join(filter(None, (result.problem(tolerance) for result in results)))


def test_a_covering_of_all_layouts() -> None:
    assert not problems(covering(all_layouts(), 40), 8, 1e-10)


def test_experts_with_a_capacity_and_with_losses_over_the_batch() -> None:
    """The latter are of a micro-batch of all data ranks, so that of one process must be as large."""
    base = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "layers": [1], "z_loss": 0.01, "aux_loss": 0.1}
    shapes = [
        (2, {}, 4), (2, {"tp": 2, "sp": True, "ep": 2}, 8), (4, {"tp": 2, "ep": 4}, 4), (4, {"cp": 2, "ep": 2}, 4),
        (4, {"tp": 2, "cp": 2, "sp": True, "expert_tp": 2}, 8),
    ]  # fmt: skip
    cases = [
        case("moe", ranks, parallel=parallel, micro=micro, variant={"moe": {**base, **more}})
        for ranks, parallel, micro in shapes
        for more in ({"aux_loss_scope": "batch"}, {"capacity_factor": 0.8, "score": "sigmoid"})
    ]
    assert not problems(cases, 4, 1e-10)


def test_in_fp32() -> None:
    """Where single precision can tell: not of `tied`, whose key bias no softmax sees, so that its gradient is zero but
    for rounding, nor of Muon and many layers, which multiply rounding."""
    small = [
        one
        for one in all_layouts()
        if one.ranks <= 4 and one.model["num_layers"] < 4 and one.optimizer == "adamw" and one.name != "tied"
    ]
    cases = [replace(one, precision="fp32") for one in covering(small, 8)]
    assert not problems(cases, 4, 1e-5)
