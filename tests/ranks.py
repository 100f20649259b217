"""Run a function on a few ranks: `run_ranks(function, 4, argument, ...)`.

The ranks are processes of a fork server that has imported torch already, so they start in a fraction of a second, and
talk over gloo. The function must be importable (module level), and its arguments and results picklable.
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
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

# What ranks import, once for all of them: the parts of mega, and what the modules of tests ask for.
PRELOAD = [
    "mega_trainer.run.training_run",
    "mega_ckpt.convert",
    "mega_eval.model_loading",
    "torch._dynamo",
    "pytest",
    "hypothesis",
]


class RankError(Exception):
    """A rank raised: which one, and its traceback."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks of one gloo process group; returns each rank's result, by rank.

    Raises:
        RankError: the first error of a rank, with its traceback; the other ranks are ended then.
        TimeoutError: when not all ranks are done in `timeout` seconds, naming those that are not.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    work = (inspect.getfile(function), function.__module__, pickle.dumps((function, args)))
    with tempfile.TemporaryDirectory() as scratch:
        store = Path(scratch) / "store"
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, store, timeout, pipe[1], *work), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        try:
            for rank in ranks:
                rank.start()
            for _, sender in pipes:
                sender.close()
            return _collect([receiver for receiver, _ in pipes], ranks, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _collect(receivers: Sequence[Connection], ranks: Sequence[BaseProcess], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        open_ones = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in results}
        ready = wait(list(open_ones), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(open_ones.values())} are not done in time")
        for receiver in ready:
            rank = open_ones[receiver]
            try:
                trace, results[rank] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                ranks[rank].join(5)
                raise RankError(f"rank {rank} died with exit code {ranks[rank].exitcode}") from None
            if trace:
                raise RankError(f"rank {rank} of {len(receivers)}:\n{trace}") from results[rank]
    return [results[rank] for rank in range(len(receivers))]


def _rank(
    rank: int, world_size: int, store: Path, timeout: float, pipe: Connection, file: str, module: str, work: bytes
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _import(file, module)
    function, args = pickle.loads(work)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        answer = pickle.dumps((None, function(*args)))
        if dist.is_initialized():
            dist.barrier()  # a rank that is done early would take its connections to the others with it
    except BaseException as error:  # noqa: BLE001 - DCP's is no Exception
        answer = _failure(error)
    pipe.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def _failure(error: BaseException) -> bytes:
    trace = traceback.format_exc()
    try:
        answer = pickle.dumps((trace, error))
        pickle.loads(answer)
    except Exception:  # noqa: BLE001 - anything can be unpicklable
        answer = pickle.dumps((trace, RankError(repr(error))))
    return answer


def _import(file: str, module: str) -> None:
    """Import a test module under the name that pytest gave it, by which alone it may not be found."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        top = ModuleType(module.split(".")[0])
        top.__path__ = [str(Path(file).parents[module.count(".") - 1])]
        sys.modules[top.__name__] = top
        importlib.import_module(module)
