"""The host waits for its device once a training step, and once an evaluation: in no layer and in no micro-batch."""

from __future__ import annotations

import torch.distributed as dist
from host_waits import LAYOUTS, count_all
from ranks import run_ranks


def alone() -> dict[str, dict[str, list[str]]]:
    """Counted in a rank's process, which ends after it."""
    dist.destroy_process_group()
    return count_all()


def test_a_step_waits_once() -> None:
    (found,) = run_ranks(alone, 1)
    once = {
        "training step": ["copy to the host: step.py train_step"],
        "evaluation": ["copy to the host: step.py evaluate"],
    }
    assert found == dict.fromkeys(LAYOUTS, once)
