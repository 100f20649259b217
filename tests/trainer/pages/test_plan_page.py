from __future__ import annotations

import pytest

from mega_trainer.pages.plan_page import SEEN, Pipeline, schedule_picture


@pytest.mark.parametrize(
    ("pipeline", "drawn"),
    [
        (Pipeline("1f1b", 2, 1, 8), 8),
        (Pipeline("1f1b", 4, 2, 512), SEEN // 4),
        (Pipeline("zbv", 16, 2, 512), 25),
        (Pipeline("1f1b", 16, 8, 512), 9),
    ],
)
def test_a_picture_has_no_more_operations_than_one_can_see(pipeline: Pipeline, drawn: int) -> None:
    picture, text = schedule_picture(pipeline)
    assert f"{drawn} microbatches" in picture
    assert (f"with {drawn} of 512" in text) == (drawn < pipeline.microbatches)
    assert len(picture) < 600_000
