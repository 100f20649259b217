"""Reward of an answer: 1 for the right sum."""

from typing import Any


def exact(prompt: str, answer: str, record: dict[str, Any]) -> float:
    """Return 1 if the answer is the sum of the record, else 0."""
    return float(answer.strip() == str(record["sum"]))
