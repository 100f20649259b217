"""The schedule `my_extension`: it goes from 1 to 0, and a run with it is verified."""

from __future__ import annotations

from pathlib import Path

from mega_trainer.extend import load_extensions, verify_run

FILE = str(Path(__file__).parent / "my_extension.py")
ENTRY = load_extensions([FILE]).entries("schedules")["my_extension"]


def test_it_goes_from_one_to_zero() -> None:
    values = [ENTRY.share(done / 10, options=ENTRY.options()) for done in range(11)]
    assert (values[0], values[-1]) == (1, 0)
    assert values == sorted(values, reverse=True)


def test_a_run_with_it_is_the_same_in_every_layout() -> None:
    run = {"extensions": [FILE], "model": {"preset": "tiny"}, "lr_schedule": {"name": "my_extension"}}
    assert verify_run(run, layouts=2) == []
