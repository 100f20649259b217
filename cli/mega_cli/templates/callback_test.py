"""The callback `my_extension`: its number, and a run with it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

from mega_trainer.extend import load_extensions, verify_run

FILE = str(Path(__file__).parent / "my_extension.py")
ENTRY = load_extensions([FILE]).entries("callbacks")["my_extension"]


def test_its_number_is_the_perplexity_of_the_step() -> None:
    after_step = ENTRY.build(ENTRY.options(largest=100))
    found = [after_step(SimpleNamespace(result=SimpleNamespace(loss=loss))) for loss in (0.5, 50)]
    assert found == [{"perplexity": math.exp(0.5)}, {"perplexity": 100}]


def test_a_run_with_it_is_the_same_in_every_layout() -> None:
    run = {"extensions": [FILE], "model": {"preset": "tiny"}, "callbacks": {"my_extension": {}}}
    assert verify_run(run, layouts=1) == []
