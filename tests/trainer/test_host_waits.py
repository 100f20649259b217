"""The host waits for its device once a training step, and once an evaluation: in no layer and in no micro-batch."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from host_waits import LAYOUTS, count_all
from ranks import run_ranks

COVERED = {"one rank", "experts, spread, with a bound"}  # by others, which do all that these do
NAMES = [name for name in LAYOUTS if name not in COVERED]


def alone() -> dict[str, dict[str, list[str]]]:
    """Counted in a rank's process, which ends after it."""
    dist.destroy_process_group()
    return count_all(NAMES)


@pytest.mark.long
def test_a_step_waits_once() -> None:
    (found,) = run_ranks(alone, 1, timeout=200)
    once = {
        "training step": ["copy to the host: run/train_step.py train_step"],
        "evaluation": ["copy to the host: run/train_step.py evaluate_losses"],
    }
    assert found == dict.fromkeys(NAMES, once)
