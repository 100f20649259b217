"""`mega report`, `mega top` and `mega plan --html`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mega_cli.main import main

LINE = {
    "step": 1, "loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 9.0, "seconds": 2.0, "mfu": 0.1,
    "memory_bytes": 1e9,
}  # fmt: skip
RUN = {
    "model": {"preset": "llama3-8b"},
    "data": {"train": [{"path": "data/wiki"}], "seq_length": 8192},
    "parallel": {"tp": 2, "sp": True, "pp": 4},
    "batch": {"micro": 1, "global": 64},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    return folder


def status(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


def test_a_report_is_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "pages/report.html"
    assert status("report", str(run), "--out", str(page)) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert "<h1>Run run</h1>" in page.read_text()


def test_a_report_of_no_run_or_to_no_file(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("report", str(tmp_path / "other")) == 2
    assert "other does not exist" in capsys.readouterr().err
    assert status("report", str(run), "--out", str(tmp_path)) == 2
    assert f"--out {tmp_path}: the file cannot be written" in capsys.readouterr().err


def test_top_prints_a_run_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("top", str(run), "--once") == 0
    assert "loss" in capsys.readouterr().out
    assert status("top", str(run.parent)) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err


def test_a_plan_is_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    page = tmp_path / "plan.html"
    words = ("plan", str(tmp_path / "run.yaml"), "--ranks", "16", "--html", str(page))
    assert status(*words) == 0
    plain = page.read_text()
    assert status(*words, "--machine", "h100") == 0
    timed = page.read_text()
    assert "Peak memory of each pipeline rank" in plain
    assert "1f1b: 4 ranks, 32 microbatches" in plain
    assert "time goes" not in plain
    assert "time goes" in timed
    assert "GPU memory" in timed
