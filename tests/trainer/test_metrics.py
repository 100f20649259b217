from __future__ import annotations

import json
from pathlib import Path

from mega_trainer.metrics import forget_after


def test_lines_after_the_step_that_a_run_goes_on_from_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo')
    assert forget_after(path, 3) == ({"step": 1}, {"step": 3}, {"step": 5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_nothing_is_rewritten_when_nothing_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    before = path.stat().st_ino
    assert forget_after(path, 1) == ({"step": 1}, {"step": 1}, {"step": 1})
    assert forget_after(tmp_path / "missing.jsonl", 1) is None
    assert path.stat().st_ino == before
