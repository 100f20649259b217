"""Work done by several processes, whose results come in the order of the work."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from typing import TypeVar

AHEAD = 4  # items per process that wait or are under way

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    call: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Each item and what `call` makes of it; by `workers` processes, or by this one if it is one."""
    if workers == 1:
        yield from ((item, call(item)) for item in items)
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start)
    try:
        for item in items:
            if len(pending) >= AHEAD * workers:
                yield _first(pending)
            pending.append((item, pool.submit(call, item)))
        while pending:
            yield _first(pending)
    finally:
        pool.shutdown(cancel_futures=True)


def _first(pending: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    item, future = pending.popleft()
    return item, future.result()


def _start() -> None:
    """What a worker begins with: it leaves Ctrl-C to its parent, and ends when that is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # nobody is left to take a result, and the queue between them tells no one
