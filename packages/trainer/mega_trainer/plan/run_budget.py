"""Hours, cost and energy of a run for a number of tokens, and limits on them as users write them: 2T, 30d, 500k."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mega_common.errors import ConfigError
from mega_trainer.plan.machine import MachineSpec

_COUNTS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_HOURS = {"H": 1.0, "D": 24.0, "W": 168.0}
_NUMBER = r"([\d.]+(?:e\d+)?)\s*"


@dataclass(frozen=True)
class BudgetLimits:
    """Limits of a run's tokens, hours and cost.

    Attributes:
        tokens: tokens to train on.
        hours: most hours of training, or None.
        cost: most cost, in the currency of the machine's price, or None.
    """

    tokens: float
    hours: float | None = None
    cost: float | None = None

    @classmethod
    def parse(cls, tokens: str, within: str | None, under: str | None) -> BudgetLimits:
        """Parse the command-line options `--tokens`, `--within` and `--under` to the limits of a run.

        Raises:
            ConfigError: for anything else than a number with its unit.
        """
        return cls(
            parse_number_with_suffix(tokens, "--tokens", "--tokens 300B or --tokens 15T"),
            None if within is None else parse_hours(within),
            None if under is None else parse_number_with_suffix(under, "--under", "--under 500k or --under 2M"),
        )


def parse_number_with_suffix(text: str, option: str, example: str) -> float:
    """Parse a number such as 300B as 3e11.

    Raises:
        ConfigError: for anything else.
    """
    number = _parse_with_unit(text, _COUNTS)
    if number is None:
        raise ConfigError(f"{option} must be a number with K, M, B or T, found {text!r}", hint=example)
    return number


def parse_hours(text: str) -> float:
    """Parse a duration such as 30d, 12h or 2w as hours.

    Raises:
        ConfigError: for anything else.
    """
    hours = _parse_with_unit(text, _HOURS)
    if hours is None:
        raise ConfigError(f"--within must be a number with h, d or w, found {text!r}", hint="--within 30d")
    return hours


def _parse_with_unit(text: str, units: dict[str, float]) -> float | None:
    found = re.fullmatch(rf"{_NUMBER}([A-Za-z]?)", text.strip())
    try:
        number = float(found[1]) * units[found[2].upper()] if found else 0.0
    except (ValueError, KeyError):
        return None
    return number if number > 0 else None


def estimate_training_budget(
    tokens: float, tokens_per_second: float, ranks: int, machine: MachineSpec
) -> dict[str, float]:
    """Return `tokens`, `hours` and, if the machine has a price and a power limit, `cost` and `energy_mwh` of its GPUs."""
    hours = tokens / tokens_per_second / 3600
    energy = {"energy_mwh": hours * ranks * machine.power_w / 1e6} if machine.power_w else {}
    cost = {"cost": hours * ranks * machine.price} if machine.price is not None else {}
    return {"tokens": tokens, "hours": hours, **cost, **energy}


def find_exceeded_limits(budget: dict[str, Any], limits: BudgetLimits) -> list[str]:
    """Return a phrase, such as "takes 12.0 days, more than 10.0", for each limit that a budget exceeds."""
    exceeded = []
    if limits.hours is not None and budget["hours"] > limits.hours:
        exceeded.append(f"takes {budget['hours'] / 24:,.1f} days, more than {limits.hours / 24:,.1f}")
    if limits.cost is not None and budget["cost"] > limits.cost:
        exceeded.append(f"costs {budget['cost']:,.0f}, more than {limits.cost:,.0f}")
    return exceeded
