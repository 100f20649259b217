"""Errors of losses, also of those that one process computes as zero."""

from __future__ import annotations

import math

import pytest

from mega_trainer.verify.case_comparison import compare_outcomes
from mega_trainer.verify.case_trainer import CaseOutcome


@pytest.mark.parametrize(
    ("loss", "reference", "error"),
    [(3.0, 2.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (math.nan, 0.0, math.inf), (math.inf, math.inf, math.inf)],
)
def test_the_error_of_a_loss_is_relative(loss: float, reference: float, error: float) -> None:
    mine, other = (CaseOutcome(losses=[value], norms=[1.0]) for value in (loss, reference))
    assert compare_outcomes(mine, other)["loss"] == error
