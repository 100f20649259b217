"""The reward `my_extension`: its values, and each line of the prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from my_extension import my_extension  # noqa: E402


@pytest.mark.parametrize(("answer", "reward"), [("", 0), ("Eel", 2 / 3), ("tree", 0.5)])
def test_the_share_of_the_letter(answer: str, reward: float) -> None:
    assert my_extension("", answer, {"letter": "e"}) == reward


def test_every_prompt_has_what_the_reward_reads() -> None:
    for line in (HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert 0 <= my_extension(record["prompt"], "some answer", record) <= 1
