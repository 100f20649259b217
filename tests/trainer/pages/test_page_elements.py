"""Figures: what they show, and that they are well-formed."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from mega_trainer.pages.axis_scale import AxisScale, format_bytes, format_duration, format_gib, format_percent
from mega_trainer.pages.page_elements import (
    FigureEvent,
    LineSeries,
    ScatterPoint,
    StackedBar,
    downsample_extremes,
    draw_area_figure,
    draw_bar_figure,
    draw_line_figure,
    draw_scatter_figure,
)


def elements(html: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(html).iter(tag))


def test_thinning_keeps_every_extreme() -> None:
    points = [(float(x), math.sin(x)) for x in range(100_000)]
    points[54_321] = (54_321.0, 50.0)
    points[77_777] = (77_777.0, -9.0)
    kept = downsample_extremes(points, 240)
    assert len(kept) <= 480
    assert {(54_321.0, 50.0), (77_777.0, -9.0)} <= set(kept)
    assert kept == sorted(kept)
    assert downsample_extremes(points[:400], 240) == points[:400]


def test_a_number_that_is_none_is_a_gap() -> None:
    values = [1.0, 2.0, math.nan, 3.0, 4.0]
    paths = elements(draw_line_figure("loss", [LineSeries("a", list(enumerate(values)))]), "path")
    drawn = [path.get("d", "") for path in paths if "line" in (path.get("class") or "")]
    assert [d.count(",") for d in drawn] == [2, 2]


def test_many_points_are_a_line_of_means_before_their_extremes() -> None:
    html = draw_line_figure(
        "x",
        [LineSeries("a", [(float(x), float(x % 7)) for x in range(5000)])],
        events=[FigureEvent(100, "restart: now")],
    )
    kinds = [path.get("class") for path in elements(html, "path")]
    assert {"line faint s0", "line s0", "event"} <= set(kinds)
    assert [path.get("data-name") for path in elements(html, "path") if path.get("class") == "line s0"] == ["a"]
    assert len(elements(html, "svg")[0].get("data-axes", "").split()) == 9
    assert len(html) < 20_000
    assert "restart" in html


def test_without_a_point_there_is_no_figure() -> None:
    assert (
        draw_line_figure("x", [LineSeries("a", [])])
        == draw_line_figure("x", [LineSeries("a", [(1, math.nan)])])
        == draw_area_figure("x", [])
        == ""
    )


def test_areas_stack_to_the_sum() -> None:
    html = draw_area_figure("phases", [LineSeries("f", [(0, 1), (1, 1)]), LineSeries("b", [(0, 2), (1, 6)])])
    lower, upper = (path.get("d", "") for path in elements(html, "path") if "area" in (path.get("class") or ""))
    tops = [float(point.split(",")[1]) for point in upper[1:].split("L")[:2]]
    floor = float(lower[1:].rstrip("Z").split("L")[2].split(",")[1])
    assert (floor - tops[1]) / (floor - tops[0]) == pytest.approx(7 / 3, rel=1e-2)


def test_names_are_escaped_and_bars_stay_inside() -> None:
    html = draw_bar_figure(
        "<b>", [StackedBar("<r>", [("a & b", 3.0), ("c", 1.0)], "4 GiB"), StackedBar("s", [("c", 2.0)])], limit=8.0
    )
    assert "<b>" not in html
    boxes = elements(html, "rect")
    assert all(float(box.get("x", 0)) + float(box.get("width", 0)) <= 480 for box in boxes)
    widths = [float(box.get("width", 0)) for box in boxes]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.2)


def test_dots_tell_what_they_are() -> None:
    html = draw_scatter_figure(
        "search",
        [ScatterPoint(1, 2, "tp 2", "tp 2 pp 4"), ScatterPoint(3, 1, "tp 4", "tp 4", large=True)],
        x_name="x",
        y_name="y",
        limit=4,
    )
    assert [title.text for title in elements(html, "title")] == ["tp 2 pp 4", "tp 4"]
    assert [circle.get("r") for circle in elements(html, "circle")] == ["4", "7"]


@pytest.mark.parametrize("values", [[0.0, 0.0], [5.0], [1e-9, 3e-9], [-3.0, 8e12], [0.001, 900.0]])
@pytest.mark.parametrize("log_from", [math.inf, 30.0])
def test_ticks_lie_on_the_axis(values: list[float], log_from: float) -> None:
    scale = AxisScale.from_values(values, 200, -180, log_from=log_from)
    assert 1 <= len(scale.compute_ticks(5)) <= 8
    assert all(20 - 1e-6 <= scale.to_position(tick) <= 200 + 1e-6 for tick in [*scale.compute_ticks(5), *values])


def test_sizes_and_times_in_words() -> None:
    assert [format_duration(s) for s in (0, 0.0123, 4.21, 61, 3600, 200_000)] == [
        "0", "12.3 ms", "4.21 s", "1 min 1 s", "1 h", "2 d 7 h",
    ]  # fmt: skip
    assert (format_bytes(0), format_bytes(1536), format_gib(3.25), format_percent(0.1234)) == (
        "0 B",
        "1.5 KiB",
        "3.25 GiB",
        "12.3 %",
    )
    assert (format_bytes(999 << 20), format_bytes(1020 << 20)) == ("999 MiB", "0.996 GiB")
