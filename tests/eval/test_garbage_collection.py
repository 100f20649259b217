"""Objects that exist when a server starts are not part of its garbage collections."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from serving import Scripted, service_of, serving

from mega_data.tokenizer import train_tokenizer
from mega_eval.garbage_collection import freeze_startup_objects


class Node:
    """Object of a reference cycle."""

    def __init__(self) -> None:
        self.other: object = self


def test_objects_of_before_are_excluded_and_come_back() -> None:
    early = [Node() for _ in range(10)]
    with freeze_startup_objects():
        assert gc.get_freeze_count() > 10
        assert not any(one in early for one in gc.get_objects() if type(one) is Node)
    assert gc.get_freeze_count() == 0
    assert sum(type(one) is Node for one in gc.get_objects()) == 10


def test_cycles_of_afterwards_are_collected() -> None:
    with freeze_startup_objects():
        node = weakref.ref(Node())
        gc.collect()
        assert node() is None


def test_objects_come_back_after_an_error() -> None:
    with pytest.raises(ValueError, match="stop"), freeze_startup_objects():
        raise ValueError("stop")
    assert gc.get_freeze_count() == 0


def test_a_server_excludes_the_objects_of_its_start(tmp_path: Path) -> None:
    train_tokenizer(["a b"], 260, tmp_path)
    with serving(service_of(Scripted(), tmp_path)):
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0
