"""Goodput: share of a run's time spent in steps that remain, over all its starts, and the lost time by reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

REASONS = ("restart", "redone", "checkpoint", "evaluation")
_LOST = "lost/"


@dataclass
class GoodputCounter:
    """Counter of a run's lost time, by reason, since its first step began.

    Attributes:
        begun: start of the first step, in Unix seconds.
        lost: seconds by reason: `restart`, between the last step of one start and the first step of the next; `redone`, in
            steps that were repeated after a restart; `checkpoint`, while a save blocked training; `evaluation`.
    """

    begun: float
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REASONS, 0.0))

    @classmethod
    def resume_counter(
        cls, first: Mapping[str, float], kept: Mapping[str, float], last: Mapping[str, float], now: float
    ) -> GoodputCounter:
        """Return the goodput counter of a run that resumes at time `now`, from three lines of metrics.jsonl.
        The lines are the first, the line `kept` after which the run resumes, and the last; the steps after `kept` count
        as redone.

        With an empty `kept` all steps are redone. Lines without `time`, of earlier versions, start a new counter.
        """
        if not all("time" in line for line in (first, kept or first, last)):
            return cls(now)
        begun = first["time"] - first["seconds"]
        lost = {reason: float(last.get(_LOST + reason, 0.0)) for reason in REASONS}
        known = sum(lost[reason] - kept.get(_LOST + reason, 0.0) for reason in REASONS)
        lost["redone"] += max(0.0, last["time"] - kept.get("time", begun) - known)
        lost["restart"] += max(0.0, now - last["time"])
        return cls(min(begun, now - sum(lost.values())), lost)  # the clock may have been set back since

    def add_lost_phases(self, phases: Mapping[str, float]) -> None:
        """Add the seconds of a step's phases that are not training, `save` and `evaluate`, to the lost time."""
        self.lost["checkpoint"] += phases.get("save", 0.0)
        self.lost["evaluation"] += phases.get("evaluate", 0.0)

    def metrics_fields(self, now: float) -> dict[str, float]:
        """Return the fields of metrics.jsonl `goodput`, the share of time not lost, and `lost/REASON`, in seconds.

        `now` must not jump: use the Unix time at the start of this process plus the monotonic time since.
        """
        passed = max(now - self.begun, 1e-9)
        share = max(0.0, 1 - sum(self.lost.values()) / passed)
        return {"goodput": share, **{_LOST + reason: seconds for reason, seconds in self.lost.items()}}
