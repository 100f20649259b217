"""A long run under torchrun that meets with many faults, of kinds, at steps and on ranks that a seed draws."""

from __future__ import annotations

import html
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crash.jobs import Job, Settings, ended, same_bits, settings_of, undisturbed

from mega_trainer.job.step_replay import read_recorded_steps
from mega_trainer.pages.run_log import RunLog
from mega_trainer.pages.run_page import render_run_page

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LAYOUTS = ((4, 150, 2), (2, 260, 2), (3, 400, 2))  # ranks, the step they end after, and how many faults befall them
KINDS = ("kill", "stop", "hang", "raise")
INTERVAL = 10


def drawn(seed: int) -> list[tuple[int, str]]:
    """(step, fault) as `faulty.py` reads it, by step: each layout starts once, and once more after each fault."""
    draw, first, start, found = random.Random(seed), 1, 0, []
    for ranks, last, count in LAYOUTS:
        for step in sorted(draw.sample(range(first + 1, last), count)):
            kind = KINDS[len(found)] if len(found) < len(KINDS) else draw.choice(KINDS)
            found.append((step, f"{start}:{draw.randrange(ranks)}:{step}:{kind}"))
            start += 1
        first, start = last, start + 1
    return found


def legs(raw: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any], int]]:
    """In one layout after the other: ranks, the run, and the status that it ends with."""
    for ranks, last, _ in LAYOUTS:
        ends = {"exit_interval": last} if last < raw["train"]["steps"] else {}
        yield ranks, {**raw, "train": {**raw["train"], **ends}}, 75 if ends else 0


def test_400_steps_with_faults_in_changing_layouts_have_the_bits_of_an_undisturbed_run(
    settings: Settings, tmp_path: Path
) -> None:
    """Bit for bit those of the same layouts without a fault; of one process up to rounding. The report shows every fault."""
    checkpoint = {"memory_every": INTERVAL}
    parts: dict[str, Any] = {
        "precision": "fp64",
        "train": {"steps": 400},
        "checkpoint": checkpoint,
        "timeout_seconds": 6,
    }
    faults = drawn(17)
    for ranks, raw, ends in legs(settings_of(settings, tmp_path, "soaked", **parts)):
        with Job(raw, tmp_path / str(ranks), nodes="1", ranks=ranks) as job:
            assert ended([job.launch(" ".join(fault for _, fault in faults))]) == [ends], job.told()
    for ranks, raw, _ in legs(settings_of(settings, tmp_path, "quiet", **parts)):
        undisturbed(raw, ranks)
    assert same_bits(tmp_path / "quiet", tmp_path / "soaked")
    undisturbed(settings_of(settings, tmp_path, "alone", **parts), 1)
    expected, lines = (read_recorded_steps(tmp_path / name).values() for name in ("alone", "soaked"))
    assert [line["consumed_samples"] for line in lines] == [12 * step for step in range(1, 401)]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], rel=1e-9)
    log = RunLog.read_folder(tmp_path / "soaked")
    page = html.unescape(render_run_page([log]))
    assert len(log.starts) == len(faults) + len(LAYOUTS)
    for step, fault in faults:
        start, rank, _, kind = fault.split(":")
        assert 0 <= step - 1 - log.starts[int(start) + 1]["step"] <= INTERVAL, fault
        words = {
            "raise": f"ValueError: planted\n  rank {rank} on",
            "kill": f", step {step}: lost the connection to other ranks",
        }
        assert words.get(kind, f"  rank {rank} on") in page, fault
