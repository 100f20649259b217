"""The reward `my_extension`: its values, and each line of the prompts."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
my_extension = runpy.run_path(str(HERE / "my_extension.py"))["my_extension"]


@pytest.mark.parametrize(("answer", "reward"), [("", 0), ("Eel", 2 / 3), ("tree", 0.5)])
def test_the_share_of_the_letter(answer: str, reward: float) -> None:
    assert my_extension("", answer, {"letter": "e"}) == reward


def test_every_prompt_has_what_the_reward_reads() -> None:
    for line in (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert 0 <= my_extension(record["prompt"], "some answer", record) <= 1
