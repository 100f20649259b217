"""Process pool whose results come in the order of the work."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import TypeVar

from mega_common.errors import DataError

READ_AHEAD = 4  # items per process that are queued or in progress

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(
    call: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[tuple[Item, Result], None, None]:
    """Yield each item with the result of `call` on it, in input order, computed by `workers` processes, or by this
    process for one worker.

    Raises:
        DataError: if a process was killed; and any error of `call`.
    """
    if workers == 1:
        yield from ((item, call(item)) for item in items)
        return
    pending: deque[tuple[Item, Future[Result]]] = deque()
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _initialize_worker)
    try:
        for item in items:
            if len(pending) >= READ_AHEAD * workers:
                yield _await_first(pending)
            pending.append((item, pool.submit(call, item)))
        while pending:
            yield _await_first(pending)
    finally:
        pool.shutdown(cancel_futures=True)


def _await_first(pending: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Result]:
    item, future = pending.popleft()
    try:
        return item, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process was killed, possibly because memory ran out", hint="use fewer --workers"
        ) from error


def _initialize_worker() -> None:
    """Ignore Ctrl-C in a worker, which the parent handles, and end the worker with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # no process is left to take a result
