"""Parallel coordinates: one line for each item through the position of its value on each axis."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from mega_trainer.pages.parallel_coordinates import CoordinateAxis, draw_parallel_coordinates

AXES = [
    CoordinateAxis("optimizer.lr", [1e-3, 1e-1, 1e-2], log_from=20),
    CoordinateAxis("optimizer.name", ["lion", "adamw", "lion"]),
    CoordinateAxis("loss", [1.0, 3.0, 2.0]),
]
ITEMS = ["trial 4: <best>", "trial 0", "trial 2"]


def draw_lines(axes: list[CoordinateAxis] = AXES) -> list[tuple[str, list[tuple[float, float]]]]:
    """Tooltip and points of each line, in the order of drawing."""
    figure = draw_parallel_coordinates("Settings", axes, ITEMS)
    picture = ElementTree.fromstring(figure[figure.index("<svg") : figure.index("</svg>") + 6])
    lines = [path for path in picture.iter("path") if path.get("class", "").startswith("line")]
    return [
        (
            line.find("title").text,  # type: ignore[union-attr, misc]
            [tuple(map(float, point.split(","))) for point in re.split("[ML]", line.get("d", ""))[1:]],
        )
        for line in lines
    ]


def test_the_best_item_is_drawn_last() -> None:
    assert [name for name, _ in draw_lines()] == ["trial 2", "trial 0", "trial 4: <best>"]


def test_values_are_placed_on_their_axes() -> None:
    third, second, first = (points for _, points in draw_lines())
    assert first[0][0] < first[1][0] < first[2][0]
    assert first[0][1] > third[0][1] > second[0][1]  # larger values are higher
    assert abs(2 * third[0][1] - first[0][1] - second[0][1]) < 0.2  # logarithmic: 1e-2 is in the middle
    assert first[1] == third[1] != second[1]
    assert abs(2 * third[2][1] - first[2][1] - second[2][1]) < 0.2
    linear = dict(draw_lines([CoordinateAxis("optimizer.lr", AXES[0].values), *AXES[1:]]))
    assert linear["trial 2"][0][1] > 0.9 * linear["trial 4: <best>"][0][1]


def test_one_axis_or_one_item_is_no_figure() -> None:
    assert draw_parallel_coordinates("Settings", AXES[:1], ITEMS) == ""
    assert draw_parallel_coordinates("Settings", [CoordinateAxis("a", [1]), CoordinateAxis("b", [2])], ["one"]) == ""
