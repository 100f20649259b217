"""A step launches and waits as often as is recorded; a change that changes this records it anew, and says why."""

from __future__ import annotations

import json

from null_gpu.counts import RECORDED, count_all


def test_a_step_launches_and_waits_as_recorded() -> None:
    assert count_all() == json.loads(RECORDED.read_text())
