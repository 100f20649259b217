"""Ranks that call a function: `run_ranks(function, 4, argument, ...)`.

The ranks are processes of a fork server that has imported torch already, so they start in a fraction of a second, and
communicate by gloo. The function must be importable (module level), and its arguments and results picklable. A function that
returns an iterator, such as a generator, is a series of collective steps, whose results arrive one by one.
"""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

# modules that the fork server imports; torch's optimizers import its compiler, which takes as long as all of a small case
PRELOADED = ("mega_trainer.run.training_run", "mega_ckpt.convert", "torch._dynamo")
TIMEOUT_SECONDS = 120.0


class RankError(Exception):
    """Error of a rank, with its number and its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = TIMEOUT_SECONDS,
    preload: Sequence[str] = PRELOADED,
) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks of one gloo process group, and return the results by rank.

    The result of a function that returns an iterator is the list of its items.

    Raises:
        RankError: the first error of a rank, with its traceback; the other ranks are killed then.
        TimeoutError: when not all ranks are done in `timeout` seconds, naming those that are not.
    """
    deadline = time.monotonic() + timeout
    with _RankProcesses(function, world_size, args, timeout, preload, stream=False) as ranks:
        return ranks.receive_results(deadline)


def iterate_rank_results(
    function: Callable[..., Iterator[Any]],
    world_size: int,
    *args: Any,
    timeout: float = TIMEOUT_SECONDS,
    preload: Sequence[str] = PRELOADED,
) -> Iterator[list[Any]]:
    """Yield the items of the iterators that `function(*args)` returns on `world_size` ranks, as lists by rank.

    An item is yielded as soon as all ranks have it.

    Raises:
        RankError: the first error of a rank, with its traceback; the other ranks are killed then.
        TimeoutError: when an item is not there in `timeout` seconds, naming the ranks that miss it.
    """
    with _RankProcesses(function, world_size, args, timeout, preload, stream=True) as ranks:
        while (items := ranks.receive_results(time.monotonic() + timeout))[0] is not _END:
            yield items


class _End:
    """Mark of the end of a stream, equal to itself after pickling."""

    def __reduce__(self) -> str:
        return "_END"


_END = _End()


class _RankProcesses:
    """Processes of the ranks, killed when the context ends, and the pipes of their results."""

    def __init__(
        self,
        function: Callable[..., Any],
        world_size: int,
        args: Sequence[Any],
        timeout: float,
        preload: Sequence[str],
        *,
        stream: bool,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*preload, "mega_trainer.launch.frozen_imports"])
        work = (inspect.getfile(function), function.__module__, pickle.dumps((function, args)), stream)
        self._scratch = tempfile.TemporaryDirectory()
        store = Path(self._scratch.name) / "store"
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        self._receivers = [receiver for receiver, _ in pipes]
        self._senders = [sender for _, sender in pipes]
        self._queues: list[deque[Any]] = [deque() for _ in pipes]
        self._ranks: list[BaseProcess] = [
            context.Process(target=_run_rank, args=(rank, world_size, store, timeout, sender, *work), daemon=True)
            for rank, sender in enumerate(self._senders)
        ]

    def __enter__(self) -> _RankProcesses:
        for rank in self._ranks:
            rank.start()
        for sender in self._senders:
            sender.close()
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.join()
        self._scratch.cleanup()

    def receive_results(self, deadline: float) -> list[Any]:
        """Return the next result of each rank."""
        while missing := [rank for rank, queue in enumerate(self._queues) if not queue]:
            open_ones = {self._receivers[rank]: rank for rank in missing}
            ready = wait(list(open_ones), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {sorted(open_ones.values())} are not done in time")
            for receiver in ready:
                assert isinstance(receiver, Connection)
                self._queues[open_ones[receiver]].append(self._receive(receiver, open_ones[receiver]))
        return [queue.popleft() for queue in self._queues]

    def _receive(self, receiver: Connection, rank: int) -> Any:
        try:
            trace, result = pickle.loads(receiver.recv_bytes())  # noqa: S301 - written by a process of our own
        except EOFError:
            self._ranks[rank].join(5)
            raise RankError(f"rank {rank} died with exit code {self._ranks[rank].exitcode}") from None
        if trace:
            raise RankError(f"rank {rank} of {len(self._ranks)}:\n{trace}") from result
        return result


def _run_rank(
    rank: int,
    world_size: int,
    store: Path,
    timeout: float,
    pipe: Connection,
    file: str,
    module: str,
    work: bytes,
    stream: bool,
) -> None:
    """Run a rank: join the process group, call the function and send its results."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _import_module(file, module)
    function, args = pickle.loads(work)  # noqa: S301 - written by a process of our own
    try:
        limit = timedelta(seconds=2 * timeout)  # the caller names the ranks that wait before a collective gives up
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
        result = function(*args)
        if stream:
            for item in result:
                pipe.send_bytes(pickle.dumps((None, item)))
        answer = pickle.dumps((None, _END if stream else [*result] if isinstance(result, Iterator) else result))
        if dist.is_initialized():
            dist.barrier()  # a rank that ends early would close its connections to the others
    except BaseException as error:  # noqa: BLE001 - DCP's error is not an Exception
        answer = _pickle_failure(error)
    pipe.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def _pickle_failure(error: BaseException) -> bytes:
    trace = traceback.format_exc()
    try:
        answer = pickle.dumps((trace, error))
        pickle.loads(answer)  # noqa: S301 - written one line above
    except Exception:  # noqa: BLE001 - any error can be unpicklable
        answer = pickle.dumps((trace, RankError(repr(error))))
    return answer


def _import_module(file: str, module: str) -> None:
    """Import the module of a function by name, or from its file if the name is not found, as of a test's module."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        top = ModuleType(module.split(".")[0])
        top.__path__ = [str(Path(file).parents[module.count(".") - 1])]
        sys.modules[top.__name__] = top
        importlib.import_module(module)
