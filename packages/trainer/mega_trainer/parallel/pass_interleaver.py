"""Alternating execution of a forward and a backward, to hide the expert exchange of each under the other's computation.

Both are ordinary code, the forward in the calling thread and the backward in a second one, of which exactly one runs at any
time: a pass runs until it has to wait for its exchange, and lets the other one run before it waits. The turns depend only on
the program, so all ranks issue their collectives in one order, and each pass computes what it computes alone, bit for bit.

    forward     attention, dispatch >            experts, combine >                 attention, dispatch > ..
    backward                         > experts, dispatch' >             > attention, combine' >           ..

On a GPU an exchange runs on the stream of its process group. Its wait is an event that the compute stream waits for, after the
kernels of the other pass, which were enqueued in between. On a CPU it runs in gloo's threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from mega_trainer.distributed.comm import CollectiveWork

Result = TypeVar("Result")


class PassInterleaver:
    """Alternator of a forward and a backward that call `switch_pass` before they wait for an exchange."""

    def __init__(self) -> None:
        self._turns: tuple[threading.Semaphore, ...] = ()
        self._running, self._unfinished = 0, 0
        self._error: BaseException | None = None

    def run_pair(self, forward: Callable[[], Result], backward: Callable[[], object]) -> Result:
        """Run a forward and a backward that alternate at each `switch_pass`, and return the forward's result.
        The forward starts. An error of either pass ends both and is raised here.
        """
        self._turns = (threading.Semaphore(0), threading.Semaphore(0))
        self._running, self._unfinished, self._error = 0, 2, None
        result: list[Result] = []
        second = threading.Thread(target=self._run_second, args=(backward, _current_stream_context()), daemon=True)
        second.start()
        self._run_pass(lambda: result.append(forward()))
        second.join()
        if self._error is not None:
            raise self._error
        return result[0]

    def switch_pass(self) -> None:
        """Let the other pass run until its next switch or its end; do nothing if there is no other pass."""
        if self._unfinished == 2:
            own = self._running
            self._start_other()
            self._turns[own].acquire()
        if self._unfinished and self._error is not None:
            raise self._error

    def interleave_wait(self, work: CollectiveWork) -> CollectiveWork:
        """Return a handle of an exchange (`work`) whose `wait` first lets the other pass run."""
        return _InterleavedWork(work, self)

    def _run_second(self, backward: Callable[[], object], stream: AbstractContextManager[Any]) -> None:
        self._turns[1].acquire()
        # autograd's thread of a GPU must stay free: the forward may differentiate too, for example its loss
        with stream, torch.autograd.set_multithreading_enabled(False):
            self._run_pass(backward)

    def _run_pass(self, run: Callable[[], object]) -> None:
        try:
            if self._error is None:
                run()
        except BaseException as error:  # noqa: BLE001 - raised by `run_pair`, in the calling thread
            self._error = self._error or error
        self._unfinished -= 1
        self._start_other()

    def _start_other(self) -> None:
        self._running = 1 - self._running
        self._turns[self._running].release()


@dataclass(frozen=True)
class _InterleavedWork:
    work: CollectiveWork
    interleaver: PassInterleaver

    def wait(self) -> None:
        """Let the other pass run, then wait for the exchange."""
        self.interleaver.switch_pass()
        self.work.wait()


def _current_stream_context() -> AbstractContextManager[Any]:
    """Return the context in which another thread uses this thread's device and stream."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.stream(torch.cuda.current_stream()) if initialized else nullcontext()
