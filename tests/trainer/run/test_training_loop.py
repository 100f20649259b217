from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from mega_trainer.run.training_loop import GarbageCollectionSchedule


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_garbage_is_collected_at_its_steps_alone() -> None:
    with GarbageCollectionSchedule(3) as garbage:
        gone = weakref.ref(Knot())
        left = []
        for step in range(1, 5):
            garbage.collect_after_step(step)
            left.append(gone() is not None)
            assert not gc.isenabled()
    assert left == [True, True, False, False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_without_steps_python_collects_when_it_likes() -> None:
    with GarbageCollectionSchedule(0) as garbage:
        garbage.collect_after_step(1)
        assert gc.isenabled()


def test_a_process_that_had_it_off_keeps_it_off() -> None:
    gc.disable()
    with GarbageCollectionSchedule(2):
        pass
    assert not gc.isenabled()
