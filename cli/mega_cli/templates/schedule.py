"""Learning-rate schedule `my_extension`: a decay by a root (arXiv:2405.18392). Change it to yours.

share of the decay that remains = 1 - done^power
"""

from __future__ import annotations

from pydantic import Field

from mega_trainer.extend import Extension, Schedule, StrictConfig


class RootOptions(StrictConfig):
    """Settings of `lr_schedule.options` in run.yaml."""

    power: float = Field(0.5, gt=0)


def compute_decay_share(done: float, *, options: RootOptions) -> float:
    """Return the share of the decay from `lr` to `lr_schedule.min_lr` that remains when a share `done` has passed."""
    remaining: float = 1 - done**options.power
    return remaining


EXTENSION = Extension(
    name="my-extension", version="0.1", api=1, schedules={"my_extension": Schedule(compute_decay_share, RootOptions)}
)
