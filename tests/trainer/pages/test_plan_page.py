from __future__ import annotations

import pytest

from mega_trainer.pages.plan_page import MAX_RANK_OPERATIONS, PipelineShape, draw_pipeline_schedule


@pytest.mark.parametrize(
    ("pipeline", "drawn"),
    [
        (PipelineShape("1f1b", 2, 1, 8), 8),
        (PipelineShape("1f1b", 4, 2, 512), MAX_RANK_OPERATIONS // 4),
        (PipelineShape("zbv", 16, 2, 512), 25),
        (PipelineShape("1f1b", 16, 8, 512), 9),
    ],
)
def test_a_picture_has_no_more_operations_than_one_can_see(pipeline: PipelineShape, drawn: int) -> None:
    picture, text = draw_pipeline_schedule(pipeline)
    assert f"{drawn} microbatches" in picture
    assert (f"Shows {drawn} of 512" in text) == (drawn < pipeline.microbatches)
    assert len(picture) < 600_000
