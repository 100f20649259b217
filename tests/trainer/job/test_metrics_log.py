from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks

from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job import metrics_log as metrics_module
from mega_trainer.job.metrics_log import MetricsLogger, MfuCalculator, drop_metrics_after_step
from mega_trainer.job.step_replay import read_recorded_steps
from mega_trainer.job.step_result import StepResult
from mega_trainer.run.training_run import run_training


def test_lines_after_the_step_that_a_run_goes_on_from_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 6)) + '{"step": 6, "lo')
    assert drop_metrics_after_step(path, 3) == ({"step": 1}, {"step": 3}, {"step": 5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_nothing_is_rewritten_when_nothing_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    before = path.stat().st_ino
    assert drop_metrics_after_step(path, 1) == ({"step": 1}, {"step": 1}, {"step": 1})
    assert drop_metrics_after_step(tmp_path / "missing.jsonl", 1) is None
    assert path.stat().st_ino == before


def test_the_screen_has_a_line_a_second_at_most_and_the_file_every_step(
    settings: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(monotonic=lambda: 0.3 * next(clock), time=time.time))
    config = RunConfig.parse(settings(train={"steps": 9}))
    Path(config.output).mkdir()
    with (
        caplog.at_level("INFO", "mega"),
        MetricsLogger(config, MfuCalculator(1.0, 1.0, 1.0), 0, 0, writes=True) as metrics,
    ):
        for step in range(1, 10):
            more = {"valid_loss": 1.0} if step == 6 else {}
            metrics.log_step(
                step, 4 * step, 1e-3, StepResult(2.0, 1.0, 64.0, updated=True), phases={"forward": 0.1}, **more
            )
    told = [int(found) for found in re.findall(r"step +(\d+)/9", caplog.text)]
    assert told == [1, 5, 6, 9]
    lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 10)]
    assert "forward 33 %" in caplog.text


@pytest.mark.parametrize("steps", [9, 1000, 1_000_000])
@pytest.mark.parametrize("known", [False, True])
def test_a_line_fits_the_screen_and_has_no_mfu_of_an_unknown_peak(
    settings: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture, steps: int, known: bool
) -> None:
    config = RunConfig.parse(settings(train={"steps": steps}))
    Path(config.output).mkdir()
    phases = {"data": 0.01, "forward": 0.3, "backward": 0.5, "reduce": 0.1, "norm": 0.1, "update": 0.1}
    speed = MfuCalculator(1e3, 1e3, 1e9, peak_is_known=known)
    with caplog.at_level("INFO", "mega"), MetricsLogger(config, speed, 0, 0, writes=True) as metrics:
        for step in (1, steps):
            result = StepResult(12.3456, 123.456, 64.0, updated=True)
            metrics.log_step(step, 4 * step, 1e-3, result, phases=phases, valid_loss=12.3456)
    assert all(len(f"00:00:00 {record.message}") <= 120 for record in caplog.records)
    assert (" MFU " in caplog.records[0].message) == known
    assert "mfu" in json.loads((Path(config.output) / "metrics.jsonl").read_text().splitlines()[0])


DAY, YEAR = 86400.0, 365 * 86400.0


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("at", [1, 4, 9])
@pytest.mark.parametrize("jump", [-YEAR, -DAY, -1.0, DAY, YEAR])
def test_a_clock_that_is_set_during_a_run_changes_no_duration(
    settings: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, jump: float, at: int, resumes: bool
) -> None:
    """Steps take 10 s, of which a save takes 1 s; a run that goes on may count a jump in between as a restart."""
    now = [1e6, 1.7e9]
    monkeypatch.setattr(metrics_module, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[1]))
    config = RunConfig.parse(settings(train={"steps": 9}))
    Path(config.output).mkdir()
    for first, last in [(1, 5), (6, 9)] if resumes else [(1, 9)]:
        with MetricsLogger(config, MfuCalculator(1.0, 1.0, 1.0), first - 1, 4 * (first - 1), writes=True) as metrics:
            for step in range(first, last + 1):
                now = [now[0] + 10, now[1] + 10 + (jump if step == at else 0)]
                result = StepResult(2.0, 1.0, 64.0, updated=True)
                metrics.log_step(step, 4 * step, 1e-3, result, phases={"forward": 8.0, "save": 1.0})
    lines = [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]
    assert [line["seconds"] for line in lines] == [10.0] * 9
    assert [line["lost/checkpoint"] for line in lines] == [*range(1, 10)]
    assert all(value >= 0 for line in lines for value in line.values())
    assert all(line["goodput"] <= 1 for line in lines)
    if not resumes:
        assert [line["goodput"] for line in lines] == pytest.approx([0.9] * 9)
        assert all(line["lost/restart"] == line["lost/redone"] == 0 for line in lines)


Settings = Callable[..., dict[str, Any]]


def sweep(runs: list[dict[str, Any]]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for raw in runs:
        run_training(RunConfig.parse(raw), RankInfo(rank, size, rank))


def test_norms_by_layer_add_up_and_are_the_same_in_any_layout(settings: Settings, tmp_path: Path) -> None:
    def raw(name: str, **parallel: Any) -> dict[str, Any]:
        sections = {"train": {"steps": 2}, "precision": "fp64", "optimizer": {"clip_grad": 0.1}, "parallel": parallel}
        return settings(**sections, batch={"micro": 1}, debug={"layer_norms_every": 2}, output=str(tmp_path / name))

    run_training(RunConfig.parse(raw("alone")), RankInfo())
    run_ranks(sweep, 4, [raw("cut", tp=2, pp=2, zero=0), raw("sharded", zero=3)])
    alone = read_recorded_steps(tmp_path / "alone")
    line, kinds = alone[2], ("layer_grad_norm/", "layer_weight_norm/")
    assert not any(key.startswith(kinds) for key in alone[1])
    norms = {key: value for key, value in line.items() if key.startswith(kinds)}
    assert {key.split("/")[1] for key in norms} == {"embed_tokens", "0", "1", "norm", "lm_head"}
    assert math.hypot(*(norms[key] for key in norms if "grad" in key)) == pytest.approx(line["grad_norm"], rel=1e-12)
    for name in ("cut", "sharded"):
        other = read_recorded_steps(tmp_path / name)[2]
        assert {key: other[key] for key in norms} == pytest.approx(norms, rel=1e-10), name
