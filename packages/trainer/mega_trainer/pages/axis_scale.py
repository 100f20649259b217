"""Axes of a figure: range, ticks and number formats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mega_common.progress_logging import format_with_decimal_unit


@dataclass(frozen=True)
class AxisScale:
    """Scale of an axis of a figure, which maps values to positions in picture units.
    It maps values from `low` to `high` to positions from `start` to `start` + `length`; it is logarithmic with `log`.
    """

    low: float
    high: float
    start: float
    length: float
    log: bool = False

    @classmethod
    def from_values(
        cls, values: Iterable[float], start: float, length: float, *, zero: bool = False, log_from: float = math.inf
    ) -> AxisScale:
        """Return the scale of a figure's axis that contains all values, and 0 with `zero`.
        It is logarithmic if the largest value is at least `log_from` times the smallest.
        """
        found = [*values] or [0.0, 1.0]
        low, high = min(found), max(found)
        if low > 0 and high / low >= log_from:
            return cls(low / 1.1, high * 1.1, start, length, log=True)
        low = min(low, 0.0) if zero else low
        margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(low if zero else low - margin, high + margin, start, length)

    def to_position(self, value: float) -> float:
        """Return the position of a value in the picture, in picture units."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return self.start + (value - low) / (high - low) * self.length

    def compute_ticks(self, most: int) -> list[float]:
        """Return about `most` round values within the range, for tick labels on the axis."""
        if self.log:
            powers = [
                10.0**power for power in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
            ]
            factors = (1, 2, 5) if len(powers) <= most // 2 else (1,)
            found = [
                factor * power for power in powers for factor in factors if self.low <= factor * power <= self.high
            ]
            return found[:: -(-len(found) // (most + 1)) or 1]
        step = _round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_step(size: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least `size`."""
    power: float = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * (1 - 1e-9))


def format_compact(value: float) -> str:
    """Return a number as text of a few characters: 12345 -> 12.3k, 0.0003 -> 3e-04."""
    if value and abs(value) < 1e-2:
        return f"{value:.1e}".replace(".0e", "e")
    return format_with_decimal_unit(round(value, 6))


def format_bytes(value: float) -> str:
    """Return a number of bytes as text with a binary unit and three digits, such as 12.3 GiB.
    A value of 1000 of a unit or more uses the next unit.
    """
    power = min(4, int(math.log(max(abs(value) * 1.024, 1.0), 1024)))
    return f"{value / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def format_gib(value: float) -> str:
    """Return a number of GiB as text with three digits and the unit: 12.3 GiB."""
    return f"{value:.3g} GiB"


def format_duration(value: float) -> str:
    """Return a number of seconds as text: 2 d 3 h, 3 h 5 min, 12 min 5 s, 3.2 s, 12 ms."""
    if not value:
        return "0"
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 60:
        return f"{value:.3g} s"
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    index = next(index for index, (size, _) in enumerate(units) if value >= size)
    (large, name), (small, after) = units[index : index + 2] if index < 3 else (units[2], units[3])
    rest = int(value % large // small)
    return f"{int(value // large)} {name}" + (f" {rest} {after}" if rest else "")


def format_percent(value: float) -> str:
    """Return a share as text in percent: 0.123 -> 12.3 %."""
    return f"{100 * value:.3g} %"


def pick_evenly_spaced_indices(count: int, most: int) -> Sequence[int]:
    """Return at most `most` of the integers 0 to `count` - 1, evenly spaced, the last one included."""
    step = max(1, math.ceil(count / most))
    return range((count - 1) % step, count, step)
