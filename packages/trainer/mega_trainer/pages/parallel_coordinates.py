"""Parallel coordinates: one vertical axis for each quantity, and one line through all axes for each item."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from mega_trainer.pages.axis_scale import AxisScale, format_compact
from mega_trainer.pages.page_elements import HEIGHT, WIDTH, draw_svg_text, format_figure, format_svg

SPACING, MARGIN, FIRST = 130, 12, 46  # between axes; at the left; of the top of the axes
LAST = 100  # room for tick labels at the right of the last axis
FAINTEST, STRONGEST = 0.15, 0.75  # opacities of the lines of the last and of the second item


@dataclass(frozen=True)
class CoordinateAxis:
    """Axis of one quantity.

    Attributes:
        name: written above the axis.
        values: number or name of each item, best item first; names are placed evenly in the order of their first use.
    """

    name: str
    values: Sequence[float | str]

    @property
    def names(self) -> list[str]:
        """Names of an axis that has at least one value that is not a number."""
        return (
            list(dict.fromkeys(map(str, self.values))) if any(isinstance(value, str) for value in self.values) else []
        )

    def place_values(self, log_from: float) -> tuple[AxisScale, list[float]]:
        """Return the scale of the axis, and the position of each item on it in picture units."""
        names = self.names
        numbers = (
            [float(names.index(str(value))) for value in self.values] if names else [float(v) for v in self.values]
        )
        scale = AxisScale.from_values(numbers, HEIGHT - MARGIN, FIRST + MARGIN - HEIGHT, log_from=log_from)
        return scale, [scale.to_position(number) for number in numbers]

    def list_ticks(self, scale: AxisScale) -> list[tuple[float, str]]:
        """Return position and label of each tick."""
        if names := self.names:
            return [(scale.to_position(index), name) for index, name in enumerate(names)]
        return [(scale.to_position(value), format_compact(value)) for value in scale.compute_ticks(5)]


def draw_parallel_coordinates(
    title: str, axes: Sequence[CoordinateAxis], items: Sequence[str], *, log_from: float = math.inf
) -> str:
    """Return an HTML figure with parallel coordinates, or "" for fewer than two axes or items.

    Args:
        axes: from left to right, with one value for each item.
        items: tooltip of each item, best first: it is drawn in another colour and in front, later ones ever fainter.
        log_from: a numeric axis is logarithmic if its largest value is at least this times the smallest.
    """
    if len(axes) < 2 or len(items) < 2:
        return ""
    places = [axis.place_values(log_from) for axis in axes]
    body = [part for index, axis in enumerate(axes) for part in _draw_axis(index, axis, places[index][0])]
    for number in reversed(range(len(items))):
        points = "L".join(f"{_axis_position(index)},{at[number]:.1f}" for index, (_, at) in enumerate(places))
        share = (number - 1) / max(1, len(items) - 2)
        style = "s1" if number == 0 else f's0" stroke-opacity="{STRONGEST + (FAINTEST - STRONGEST) * share:.2f}'
        body.append(f'<path class="line {style}" d="M{points}"><title>{escape(items[number])}</title></path>')
    width = max(WIDTH, _axis_position(len(axes) - 1) + LAST)
    return format_figure(title, format_svg(title, body, width=width))


def _axis_position(index: int) -> int:
    return MARGIN + SPACING * index


def _draw_axis(index: int, axis: CoordinateAxis, scale: AxisScale) -> Iterator[str]:
    """Yield the SVG of an axis; names are in two rows, so that long ones do not meet."""
    x = _axis_position(index)
    yield f'<path class="grid" d="M{x},{FIRST}V{HEIGHT - MARGIN}"/>'
    yield draw_svg_text(x - 4, 14 if index % 2 == 0 else 32, axis.name, "start")
    for at, label in axis.list_ticks(scale):
        yield f'<path class="grid" d="M{x - 4},{at:.1f}H{x + 4}"/>' + draw_svg_text(
            x + 7, at + 4, label, "start", "quiet"
        )
