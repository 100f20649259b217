from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from mega_trainer.job.garbage_collection import GarbageCollectionSchedule, exclude_objects_from_gc

pytestmark = pytest.mark.usefixtures("no_excluded_objects")


class Node:
    """Object of a reference cycle, which only a collection finds."""

    def __init__(self) -> None:
        self.other: object = self


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_garbage_is_collected_at_its_steps_alone() -> None:
    with GarbageCollectionSchedule(3) as garbage:
        gone = weakref.ref(Node())
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


def test_objects_of_before_are_excluded_and_come_back() -> None:
    early = [Node() for _ in range(10)]
    with exclude_objects_from_gc():
        assert gc.get_freeze_count() > 10
        assert not any(one in early for one in gc.get_objects() if type(one) is Node)
    assert gc.get_freeze_count() == 0
    assert sum(type(one) is Node for one in gc.get_objects()) == 10


def test_cycles_of_afterwards_are_collected() -> None:
    with exclude_objects_from_gc():
        node = weakref.ref(Node())
        gc.collect()
        assert node() is None


def test_objects_come_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="stop"), exclude_objects_from_gc():
        raise ValueError("stop")
    assert gc.get_freeze_count() == 0


def test_a_process_that_has_excluded_objects_keeps_them_and_no_others() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    later = Node()
    with exclude_objects_from_gc():
        assert any(one is later for one in gc.get_objects())
    assert 0 < gc.get_freeze_count() <= count
