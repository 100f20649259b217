"""The host waits for its device once a training step, and once an evaluation: in no layer and in no micro-batch."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from host_waits import LAYOUTS, count
from ranks import run_ranks


def alone(name: str) -> dict[str, list[str]]:
    """Counted in a rank's process, which ends after it."""
    dist.destroy_process_group()
    return count(name)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_waits_once(name: str) -> None:
    (found,) = run_ranks(alone, 1, name)
    assert found["training step"] == ["copy to the host: step.py train_step"]
    assert found["evaluation"] == ["copy to the host: step.py evaluate"]
