"""Results of the checks of `mega doctor`: one row of its table each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

CheckVerdict = Literal["ok", "failed", "no expectation", "skipped"]
SLOWEST = 0.8  # of the expected speed, above which a measured one is ok


@dataclass(frozen=True)
class CheckResult:
    """Result of one check of `mega doctor`.

    Attributes:
        part: of the examination, such as `kernels`.
        name: of the check, such as `attention sdpa, causal`.
        verdict: `no expectation` where the machine is unknown, `skipped` where the check cannot run here.
        measured, expected: as shown in the table; "" for none.
        value: the measured figure in `unit`, for programs; None if the check has none.
        unit: of `value`, such as `GB/s`.
    """

    part: str
    name: str
    verdict: CheckVerdict
    measured: str = ""
    expected: str = ""
    value: float | None = None
    unit: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the check result as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> CheckResult:
        """Return the check result with the fields that `to_json` returned."""
        return cls(**fields)


def make_speed_check_result(part: str, name: str, value: float, expected: float | None, unit: str) -> CheckResult:
    """Return the result of a measured speed: ok if at least `SLOWEST` = 0.8 of `expected`, not judged if that is None."""
    verdict: CheckVerdict = "no expectation"
    if expected is not None:
        verdict = "ok" if value >= SLOWEST * expected else "failed"
    wanted = "" if expected is None else f">= {SLOWEST * expected:.3g} {unit}"
    return CheckResult(part, name, verdict, f"{value:.3g} {unit}", wanted, value, unit)


def make_upper_bound_check_result(part: str, name: str, value: float, bound: float, unit: str = "") -> CheckResult:
    """Return the result of a measured error or time, which is ok up to `bound`; NaN is never ok."""
    words = f" {unit}" if unit else ""
    verdict: CheckVerdict = "ok" if value <= bound else "failed"
    return CheckResult(part, name, verdict, f"{value:.2g}{words}", f"<= {bound:.2g}{words}", value, unit)
