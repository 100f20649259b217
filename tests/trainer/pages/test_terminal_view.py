from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from mega_trainer.job.error_log import record_error
from mega_trainer.pages.run_log import RunLog
from mega_trainer.pages.terminal_view import draw_sparkline, render_run_view


@pytest.mark.parametrize(
    ("values", "drawn"), [([], ""), ([1, 1], "▄▄"), ([1, float("nan"), 3], "▁█"), (range(8), "▁▂▃▄▅▆▇█")]
)
def test_sparklines(values: list[float], drawn: str) -> None:
    assert draw_sparkline(list(values)) == drawn


def test_a_view_of_a_run_that_goes_on_or_does_not(tmp_path: Path) -> None:
    line = {
        "step": 7, "loss": 2.5, "lr": 1e-3, "grad_norm": None, "tokens_per_second": 12_300.0, "seconds": 2.0, "mfu": 0.4,
        "memory_bytes": 2.0**30, "seconds_left": 90.0, "time": 1000.0, "goodput": 0.9, "lost/restart": 61.0,
        "phases/forward": 0.6, "phases/pipeline": 0.2,
    }  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "run.yaml").write_text("train: {steps: 20}\n")
    record_error(tmp_path, 2, "no room")
    beside = {"host": "node1", "phase": "forward", "waits": "", "still": 0.2, "heard": 998.0}
    stuck = {"rank": 3, "step": 6, "waits": "all_reduce in dp of ranks 0, 3", "still": 61.0}
    signs = [{**beside, "rank": 0, "step": 7}, {**beside, **stuck}]
    (tmp_path / "ranks.json").write_text(json.dumps(signs))

    def told(now: float) -> str:
        console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(render_run_view(RunLog.read_folder(tmp_path), now))
        return console.export_text()

    text = told(1001.0)
    for words in (
        "running",
        "7 of 20, 1 min 30 s left",
        "12.3k",
        "35 %",
        "lost: restart 1 min 1 s",
        "pipeline",
        "10 %",
    ):
        assert words in text
    assert re.search(r" ago, rank 2: no room", text)
    assert re.search(
        r"rank 3 +node1 +step 6 +waiting: all_reduce in dp of ranks 0, 3 +for 1 min 1 s +heartbeat 3 s ago", text
    )
    assert re.search(r"rank 3 .*\n *rank 0 +node1 +step 7 +forward +heartbeat 3 s ago", text)
    assert "no step since 1 h" in told(4600.0)
