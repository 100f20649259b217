from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
import torch

from mega_trainer import device
from mega_trainer.comm import Passing
from mega_trainer.watch import Sign, _standing, _where

TENSOR = torch.zeros(1)


class Never:
    """A message that does not come until it is let."""

    def __init__(self, reached: threading.Event, let: threading.Event) -> None:
        self.reached, self.let = reached, let

    def wait(self) -> None:
        self.reached.set()
        self.let.wait()

    cpu = wait  # or a tensor that is not done


def host_waits(never: Never) -> object:
    return Passing(TENSOR, TENSOR, [never]).wait()


def device_waits(never: Never) -> object:
    return device.to_host(never)  # type: ignore[arg-type]


def works(never: Never) -> object:
    return never.wait()


def stands(function: Callable[[Never], object], *, main: bool) -> str:
    """Where a rank stands whose main thread, or autograd's, is in a function."""
    reached, let = threading.Event(), threading.Event()
    thread = threading.Thread(target=function, args=(Never(reached, let),))
    thread.start()
    reached.wait()
    ident = thread.ident if main else threading.main_thread().ident
    assert ident is not None
    frames = sys._current_frames()
    found = _where({key: frames[key] for key in (thread.ident, threading.main_thread().ident) if key}, ident)
    let.set()
    thread.join()
    return found


@pytest.mark.parametrize(("function", "file"), [(host_waits, "comm.py"), (device_waits, "device.py")])
@pytest.mark.parametrize("main", [True, False])
def test_a_rank_that_waits_for_others_is_seen_to(function: Callable[[Never], object], file: str, main: bool) -> None:
    assert stands(function, main=main).startswith(f"mega_trainer/{file}:")


def test_the_one_that_waits_for_nobody_is_to_blame() -> None:
    places = [stands(host_waits, main=True), stands(works, main=True), stands(device_waits, main=True)]
    signs = [
        Sign(rank=rank, host="here", pid=rank, step=1, where=place, still=9.0, written=0.0)
        for rank, place in enumerate(places)
    ]
    assert [sign.rank for sign in _standing(signs, 5.0, 3)] == [1]
