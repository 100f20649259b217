"""The report of a run: from what it has written, however little."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from mega_common.errors import ConfigError
from mega_trainer.job.error_log import record_error
from mega_trainer.pages.run_log import RunLog
from mega_trainer.pages.run_page import render_run_page

VOID = {"meta", "br", "link"}


class Balanced(HTMLParser):
    """Fails on a tag that is not closed, and on anything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(html: str) -> str:
    parser = Balanced()
    parser.feed(html)
    assert not parser.open
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    return html


def line(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "loss": 5 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1000.0, "seconds": 2.0,
        "mfu": 0.4, "memory_bytes": 2.0**30, "time": 1e9 + 2 * step, "goodput": 0.9, "lost/restart": 0.0, "lost/redone": 0.0,
        "lost/checkpoint": 1.0, "lost/evaluation": 0.0, "phases/forward": 0.6, "phases/backward": 1.2, **more,
    }  # fmt: skip


def write(folder: Path, lines: list[dict[str, Any]], settings: Mapping[str, Any] = {}, starts: int = 0) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (folder / "run.yaml").write_text(yaml.safe_dump(dict(settings)))
    start = {"time": 1e9, "step": 0, "layout": {"ranks": 8, "pp": 2}, "host": "node7", "versions": {"torch": "2.13.0"}}
    (folder / "starts.jsonl").write_text((json.dumps(start) + "\n") * starts)
    return folder


def test_a_page_tells_all_that_a_run_has_logged(tmp_path: Path) -> None:
    settings = {"parallel": {"pp": 2}, "batch": {"micro": 1, "global": 32}, "train": {"steps": 100}}
    lines = [
        line(step, **{"lost/restart": 60.0 * (step > 12)}, expert_load_max=1.5, predicted_seconds=1.6)
        for step in range(1, 31)
    ]
    folder = write(
        tmp_path / "run", [*lines[:9], line(10, loss=None, valid_loss=0.75), *lines[10:]], settings, starts=2
    )
    (folder / "checkpoints/step-00000020").mkdir(parents=True)
    (folder / "checkpoints/step-00000020/manifest.json").write_text("{}")
    for rank, words in (
        (0, "no answer\n  the <hint>"),
        (2, "no answer\n  the <hint>"),
        (1, "gone"),
        (None, "rank 1 was killed"),
    ):
        record_error(folder, rank, words)
    html = check(render_run_page([RunLog.read_folder(folder)]))
    for told in (
        "of 100 steps", "best validation loss", "Gradient norm", "Step time by phase", "restart: 1 min before step 13",
        "Maximum expert load", "1f1b: 2 ranks, 8 microbatches", "step 20", "node7", "batch.global", "2.13.0", "planned 50 %",
        "0, 2</td><td>no answer\n  the &lt;hint&gt;", "1</td><td>gone", "the launcher</td><td>rank 1 was killed",
    ):  # fmt: skip
        assert told in html
    assert "Loss scale" not in html


def test_runs_beside_each_other_tell_which_settings_differ(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / name, [line(1), line(2)], {"optimizer": {"lr": lr}, "precision": "bf16"})
        for name, lr in (("a", 1e-3), ("b", 2e-3))
    ]
    html = check(render_run_page([RunLog.read_folder(folder) for folder in folders]))
    assert re.search(r"optimizer\.lr</td><td>0\.001</td><td>0\.002", html)
    assert "precision" not in html


def test_a_run_of_another_version_and_a_line_cut_short(tmp_path: Path) -> None:
    folder = write(tmp_path / "old", [{"step": 1, "loss": 2.0, "lr": 1.0, "seconds": 1.0}])
    with open(folder / "metrics.jsonl", "a") as stream:
        stream.write('nonsense\n[1]\n{"step": "x"}\n{"step": 2, "lo')
    (folder / "run.yaml").write_text("model: [")
    run = RunLog.read_folder(folder / "metrics.jsonl")
    assert run.last["step"] == 1
    check(render_run_page([run]))


def test_folders_without_a_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/metrics.jsonl").touch()
    for name, words in (
        ("none", "none does not exist"),
        ("empty", "has no metrics.jsonl"),
        ("begun", "no metrics of a step yet"),
    ):
        with pytest.raises(ConfigError, match=words):
            RunLog.read_folder(tmp_path / name)


def test_only_the_end_of_a_long_file_is_read_where_that_is_asked(tmp_path: Path) -> None:
    folder = write(tmp_path / "long", [line(step) for step in range(1, 500)])
    few = RunLog.read_folder(folder, tail=2000)
    assert few.last == RunLog.read_folder(folder).last
    assert 1 < len(few.metric_points("loss")) < 10
