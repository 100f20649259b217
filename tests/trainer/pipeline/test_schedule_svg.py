from __future__ import annotations

from xml.etree import ElementTree

import pytest

from mega_trainer.pipeline.schedule_svg import draw_schedule_svg
from mega_trainer.pipeline.schedules import PipelineOpCosts, make_pipeline_schedule, simulate_pipeline_schedule

SVG = "{http://www.w3.org/2000/svg}"


def drawn(
    name: str, pp: int, virtual_stages: int, microbatches: int, costs: PipelineOpCosts | None = None
) -> ElementTree.Element:
    schedule = make_pipeline_schedule(name, pp=pp, virtual_stages=virtual_stages, microbatches=microbatches)
    return ElementTree.fromstring(draw_schedule_svg(schedule, simulate_pipeline_schedule(schedule, costs)))


@pytest.mark.parametrize(
    ("name", "virtual_stages", "kinds"), [("1f1b", 1, 2), ("1f1b", 3, 2), ("zb-h1", 1, 3), ("zbv", 2, 3)]
)
def test_each_operation_is_one_box_inside_the_picture_and_none_overlap(name, virtual_stages, kinds) -> None:
    picture = drawn(name, 4, virtual_stages, 8)
    width, height = float(picture.get("width", 0)), float(picture.get("height", 0))
    rows: dict[float, list[tuple[float, float]]] = {}
    for box in picture.iter(f"{SVG}g"):
        rect = box.find(f"{SVG}rect")
        assert rect is not None
        x, y, wide, high = (float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
        assert x >= 0
        assert x + wide <= width
        assert y + high <= height
        rows.setdefault(y, []).append((x, wide))
    assert [len(row) for row in rows.values()] == [8 * virtual_stages * kinds] * 4
    for row in rows.values():
        ends = [x + wide for x, wide in sorted(row)]
        starts = [x for x, _ in sorted(row)]
        assert all(end <= start + 0.02 for end, start in zip(ends, starts[1:], strict=False))


def test_a_forward_of_a_pair_is_above_its_backward() -> None:
    schedule = make_pipeline_schedule("1f1b", pp=1, microbatches=3, pairs_passes=True)
    picture = ElementTree.fromstring(draw_schedule_svg(schedule, simulate_pipeline_schedule(schedule)))
    boxes = [box.find(f"{SVG}rect") for box in picture.iter(f"{SVG}g")]
    tops, heights = ([float(box.get(key, "nan")) for box in boxes if box is not None] for key in ("y", "height"))
    assert heights == [28, 14, 14, 14, 14, 28]  # F, F over B, F over B, B
    assert [top - tops[0] for top in tops] == [0, 0, 14, 0, 14, 0]


def test_it_says_what_it_shows() -> None:
    told = [text.text for text in drawn("zb-h1", 4, 1, 8).iter(f"{SVG}text")]
    assert "zb-h1: 4 ranks, 8 microbatches" in told
    assert "bubble 11.1% simulated, 11.1% by formula; 27 units of time" in told
    assert {"rank 0", "rank 3", "forward", "backward: input", "backward: weights", "idle"} <= set(told)
    assert "backward" not in told


def test_it_claims_no_formula_where_there_is_none() -> None:
    told = [text.text for text in drawn("zbv", 4, 2, 3).iter(f"{SVG}text")]
    assert not any("formula" in (text or "") for text in told)


def test_numbers_are_left_out_where_they_would_not_be_legible() -> None:
    few = [text.text for text in drawn("1f1b", 2, 1, 20).iter(f"{SVG}text")]
    many = [text.text for text in drawn("1f1b", 2, 1, 400).iter(f"{SVG}text")]
    assert few.count("17") == 4
    assert many.count("17") == 0


def test_messages_are_lines_between_ranks() -> None:
    paths = list(drawn("1f1b", 3, 1, 4).iter(f"{SVG}path"))
    outputs, gradients = (path.get("d", "").count("M") for path in paths)
    assert outputs == gradients == 2 * 4
    assert not list(drawn("1f1b", 1, 1, 4).iter(f"{SVG}path"))
