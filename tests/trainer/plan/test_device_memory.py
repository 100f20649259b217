from __future__ import annotations

import pytest

from mega_trainer.plan.device_memory import add_non_tensor_memory, count_communicators
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.training_layout import TrainingLayout


@pytest.mark.parametrize(
    ("run", "count"),
    [
        (TrainingLayout(4096), 0),
        (TrainingLayout(4096, dp=8), 2),
        (TrainingLayout(4096, tp=8, pp=8, dp=8), 4),
        (TrainingLayout(4096, tp=2, pp=2, cp=2, ep=4, dp=4), 7),
    ],
)
def test_communicators_of_several_ranks_are_counted(run: TrainingLayout, count: int) -> None:
    assert count_communicators(run) == count


def test_what_a_gpu_holds_beside_tensors_is_part_of_the_sum() -> None:
    tensors = {"weights": 10**9, "activations": 10**10}
    added = add_non_tensor_memory(TrainingLayout(4096, dp=8), tensors)
    assert list(added) == ["weights", "activations", "allocator", "communicators", "context"]
    assert added["allocator"] == pytest.approx(0.04 * 1.1e10)
    assert add_non_tensor_memory(TrainingLayout(4096, device="cpu"), tensors) == tensors


@pytest.mark.parametrize(("name", "gib"), [("h100", 79.1), ("b200", 178.4), ("a100-40", 39.4)])
def test_a_machines_memory_is_what_its_driver_reports(name: str, gib: float) -> None:
    """Taken as 70.3 and 159.8 GiB before, with a fixed share for everything that is no tensor."""
    assert load_machine(name).usable_memory_bytes == pytest.approx(gib * 2**30)
