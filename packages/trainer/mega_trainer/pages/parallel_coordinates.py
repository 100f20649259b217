"""Parallel coordinates: one vertical axis for each quantity, and one line through all axes for each item."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from mega_trainer.pages.axis_scale import AxisScale, format_compact
from mega_trainer.pages.page_elements import HEIGHT, draw_svg_text, format_svg, wrap_wide_picture

WIDE, NARROWEST = 1280, 130  # width of a picture as wide as the page; least distance of axes
MARGIN, FIRST = 12, 46  # at the left and below; top of the axes
LAST = 100  # room for tick labels at the right of the last axis
FAINTEST, STRONGEST = 0.15, 0.75  # opacities of the lines of the last and of the second item


@dataclass(frozen=True)
class CoordinateAxis:
    """Axis of one quantity in a parallel-coordinates figure.

    Attributes:
        name: written above the axis.
        values: number or name of each item, best item first; names are placed evenly in the order of their first use.
        log_from: the axis is logarithmic if its largest number is at least this times the smallest.
    """

    name: str
    values: Sequence[float | str]
    log_from: float = math.inf

    @property
    def names(self) -> list[str]:
        """Categories of the axis in the order of their first use; [] if all of its values are numbers."""
        return (
            list(dict.fromkeys(map(str, self.values))) if any(isinstance(value, str) for value in self.values) else []
        )

    def place_values(self) -> tuple[AxisScale, list[float]]:
        """Return the scale of the axis, and the position of each item on it in picture units."""
        names = self.names
        numbers = (
            [float(names.index(str(value))) for value in self.values] if names else [float(v) for v in self.values]
        )
        scale = AxisScale.from_values(numbers, HEIGHT - MARGIN, FIRST + MARGIN - HEIGHT, log_from=self.log_from)
        return scale, [scale.to_position(number) for number in numbers]

    def list_ticks(self, scale: AxisScale) -> list[tuple[float, str]]:
        """Return the position and label of each tick of the axis."""
        if names := self.names:
            return [(scale.to_position(index), name) for index, name in enumerate(names)]
        return [(scale.to_position(value), format_compact(value)) for value in scale.compute_ticks(5)]


def draw_parallel_coordinates(title: str, axes: Sequence[CoordinateAxis], items: Sequence[str]) -> str:
    """Return an HTML picture with parallel coordinates, as wide as the page, or "" for fewer than two axes or items.

    Args:
        axes: from left to right, with one value for each item.
        items: tooltip of each item, best first: it is drawn in another colour and in front, later ones ever fainter.
    """
    if len(axes) < 2 or len(items) < 2:
        return ""
    spacing = max(NARROWEST, (WIDE - MARGIN - LAST) // (len(axes) - 1))
    places = [axis.place_values() for axis in axes]
    body: list[str] = []
    for number in reversed(range(len(items))):
        points = "L".join(f"{MARGIN + spacing * index},{at[number]:.1f}" for index, (_, at) in enumerate(places))
        share = (number - 1) / max(1, len(items) - 2)
        style = (
            's1" style="stroke-width: 3'
            if number == 0
            else f's0" stroke-opacity="{STRONGEST + (FAINTEST - STRONGEST) * share:.2f}'
        )
        body.append(f'<path class="line {style}" d="M{points}"><title>{escape(items[number])}</title></path>')
    for index, axis in enumerate(axes):  # in front of the lines, so that its labels are readable
        body += _draw_axis(MARGIN + spacing * index, 14 if index % 2 == 0 else 32, axis, places[index][0])
    width = MARGIN + spacing * (len(axes) - 1) + LAST
    return wrap_wide_picture(format_svg(title, body, width=width))


def _draw_axis(x: int, top: int, axis: CoordinateAxis, scale: AxisScale) -> Iterator[str]:
    """Yield the SVG of an axis at x with its name at `top`; names are in two rows, so that long ones do not meet."""
    yield f'<path class="grid" d="M{x},{FIRST}V{HEIGHT - MARGIN}"/>'
    yield draw_svg_text(x - 4, top, axis.name, "start")
    for at, label in axis.list_ticks(scale):
        yield f'<path class="grid" d="M{x - 4},{at:.1f}H{x + 4}"/>' + draw_svg_text(
            x + 7, at + 4, label, "start", "quiet halo"
        )
