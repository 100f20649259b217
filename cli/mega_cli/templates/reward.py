"""Reward `my_extension`: the share of a letter in an answer. Change it to yours.

`objective.rewards` of run.yaml names the function; `record` is a line of prompts.jsonl. It runs in a process of its own. An
error, or an answer that is not a finite number, is a reward of 0 with a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def my_extension(prompt: str, answer: str, record: Mapping[str, Any]) -> float:
    """Return the reward of an answer: the share of its characters that are the letter of `record`."""
    return answer.lower().count(record["letter"]) / max(1, len(answer))
