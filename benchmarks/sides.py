"""The sides of a comparison, each in a process of its own: they share no memory, no setting, and no allocator's habits."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


class Side:
    """A script that answers each line on its standard input with a line of JSON."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, call: str = "") -> dict[str, Any]:
        """Its answer to one call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(call + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def times_in_turn(sides: Mapping[str, Side], call: str, rounds: int, clock: str) -> dict[str, list[float]]:
    """What each side answers under `clock`, one side after the other in each round; a round before does not count."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            told = side.run(call)[clock]
            if number:
                times[name].append(told)
    for side in sides.values():
        side.close()
    return times


def spread(values: list[float]) -> dict[str, float]:
    """Median and both ends."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}
