from __future__ import annotations

import pytest

from mega_common.errors import ConfigError
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.run_budget import BudgetLimits, estimate_training_budget, find_exceeded_limits


def test_limits_are_numbers_with_units() -> None:
    assert BudgetLimits.parse("2T", "30d", "500k") == BudgetLimits(2e12, 720.0, 5e5)
    assert BudgetLimits.parse("1.5e9", "2w", None) == BudgetLimits(1.5e9, 336.0, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("many", None, None), "--tokens must be a number with K, M, B or T, found 'many'"),
        (("1T", "30y", None), "--within must be a number with h, d or w, found '30y'"),
        (("1T", "30d", "-5"), "--under must be a number"),
    ],
)
def test_other_limits_are_refused(given: tuple[str, str | None, str | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        BudgetLimits.parse(*given)


def test_hours_cost_and_energy_follow_from_the_rate() -> None:
    machine = load_machine("h100").model_copy(update={"price": 2.0})
    budget = estimate_training_budget(3.6e9, 1e4, 8, machine)
    assert budget == {"tokens": 3.6e9, "hours": 100.0, "cost": 1600.0, "energy_mwh": pytest.approx(0.56)}
    assert find_exceeded_limits(budget, BudgetLimits(3.6e9, 100.0, 1600.0)) == []
    exceeded = find_exceeded_limits(budget, BudgetLimits(3.6e9, 48.0, 1000.0))
    assert exceeded == ["takes 4.2 days, more than 2.0", "costs 1,600, more than 1,000"]
