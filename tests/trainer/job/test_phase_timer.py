"""Where the time of a step goes, and what of a run's time was lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job import phase_timer as phases_module
from mega_trainer.job.goodput import REASONS, GoodputCounter
from mega_trainer.job.phase_timer import PhaseTimer, time_data_waits
from mega_trainer.run.training_run import run_training

Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time that phases see: clock[0]."""
    now = [0.0]
    monkeypatch.setattr(phases_module.time, "perf_counter", lambda: now[0])
    return now


def test_what_lies_within_a_phase_is_not_counted_twice(clock: list[float]) -> None:
    phases = PhaseTimer(torch.device("cpu"))
    clock[0] = 1
    with phases.time_phase("backward"):
        clock[0] = 3
        with phases.time_phase("pipeline"):
            assert phases.current == "pipeline"
            clock[0] = 7
        clock[0] = 8
    clock[0] = 20
    assert phases.take_phase_durations() == {"backward": 3, "pipeline": 4}
    assert phases.current == ""
    with phases.time_phase("evaluate"):
        clock[0] = 25
        with phases.time_phase("forward"):
            clock[0] = 26
    assert phases.take_phase_durations() == {"evaluate": 6}


def test_waiting_for_items_is_a_phase(clock: list[float]) -> None:
    phases = PhaseTimer(torch.device("cpu"))

    def loader() -> Iterator[str]:
        for item in "ab":
            clock[0] += 2
            yield item

    told = []
    for item in time_data_waits(loader(), phases.time_phase):
        clock[0] += 10
        told.append((item, phases.take_phase_durations()))
    assert told == [("a", {"data": 2}), ("b", {"data": 2})]


class Event:
    """Of a device that is two marks behind the host; reading one that it has not passed would be a wait."""

    marks = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.number = -1

    def record(self) -> None:
        self.number, Event.marks = Event.marks, Event.marks + 1

    def query(self) -> bool:
        return self.number < Event.marks - 2

    def synchronize(self) -> None:
        assert self.query()

    def elapsed_time(self, end: Event) -> float:
        return 1000.0 * (end.number - self.number)


def test_the_host_waits_for_no_device_and_tells_the_rest_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    phases = PhaseTimer(torch.device("cuda", 0))
    for name in ("forward", "update"):
        with phases.time_phase(name):
            pass
    assert phases.take_phase_durations() == {"forward": 1}
    with phases.time_phase("forward"):
        pass
    assert phases.take_phase_durations() == {"update": 1}
    assert phases.take_phase_durations() == {"forward": 1}


def test_a_run_tells_its_phases(settings: Settings) -> None:
    raw = settings(train={"steps": 4, "eval_every": 2, "eval_steps": 1}, checkpoint={"every": 2, "async": False})
    run_training(RunConfig.parse(raw), RankInfo())
    lines = [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        parts = {name: value for name, value in line.items() if name.startswith("phases/")}
        assert {f"phases/{name}" for name in ("data", "forward", "backward", "reduce", "norm", "update")} <= set(parts)
        assert sum(parts.values()) <= line["seconds"] + 1e-3
        assert 0 < line["goodput"] <= 1
    assert ["phases/evaluate" in line for line in lines] == [False, True, False, True]
    assert ["phases/save" in line for line in lines] == [False, False, True, False]  # the step after it waited
    assert lines[3]["lost/checkpoint"] == pytest.approx(lines[2]["phases/save"])
    assert lines[3]["lost/evaluation"] == pytest.approx(sum(line.get("phases/evaluate", 0.0) for line in lines))
    (start,) = (Path(raw["output"]) / "starts.jsonl").read_text().splitlines()
    told = json.loads(start)
    assert told["versions"]["torch"] == torch.__version__
    assert told["from"] == "nowhere"
    assert 0 < told["state_seconds"] < told["process_seconds"]


def line(time: float, **lost: float) -> dict[str, float]:
    return {"time": time, "seconds": 10.0, **{f"lost/{reason}": lost.get(reason, 0.0) for reason in REASONS}}


def test_time_is_lost_between_starts_and_in_steps_done_again() -> None:
    first, kept, last = line(110), line(150, checkpoint=5), line(200, checkpoint=8)
    goodput = GoodputCounter.resume_counter(first, kept, last, now=260)
    assert goodput.lost == {"restart": 60, "redone": 47, "checkpoint": 8, "evaluation": 0}
    goodput.add_lost_phases({"save": 2.0, "evaluate": 3.0, "forward": 100.0})
    told = goodput.metrics_fields(now=400)
    assert told["goodput"] == pytest.approx(1 - 120 / 300)
    assert (told["lost/checkpoint"], told["lost/evaluation"]) == (10, 3)
    again = GoodputCounter.resume_counter(line(110), line(150, checkpoint=5), {**line(300), **told}, now=410)
    assert sum(again.lost.values()) == pytest.approx(410 - 150 + 5)  # all since the step that it goes on from


def test_a_run_that_begins_again_from_the_start_has_lost_all() -> None:
    assert sum(GoodputCounter.resume_counter(line(110), {}, line(200), now=260).lost.values()) == 160


def test_lines_without_times_are_not_judged() -> None:
    assert (
        GoodputCounter.resume_counter({"step": 1}, {"step": 2}, {"step": 2}, now=50.0).metrics_fields(60.0)["goodput"]
        == 1
    )
