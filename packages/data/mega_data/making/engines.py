"""Where the parts of a data set are made: in processes of this machine, or on a Ray cluster.

An engine calls `make` with each shard, so often at once as it has workers, and gives its answers as they come. What
kills a worker is an answer too, so that the other parts go on.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, Literal

from mega_common.errors import MissingPackageError
from mega_data.making.shards import Shard

Engine = Literal["threads", "processes", "ray"]
Make = Callable[[Shard], str | None]  # makes a part, or says why it cannot be made
Answers = Generator[tuple[Shard, str | None], None, None]


def in_processes(make: Make, shards: Sequence[Shard], workers: int) -> Answers:
    """On this machine, a process for each worker."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_begin)
    try:
        under_way = {pool.submit(make, shard): shard for shard in shards}
        for future in as_completed(under_way):
            error = future.exception()
            yield under_way[future], _reason(error) if error else future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """In a process that works: be silent, and end when the one that started it is killed."""
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it is open as long as the process is there
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def on_ray(make: Make, shards: Sequence[Shard], workers: int | None) -> Answers:
    """On the Ray cluster that RAY_ADDRESS or this machine knows, else on one of this machine's own; a CPU for each part.

    The cluster's machines see the inputs, the tokenizer and the output under the same names, and have `mega_data`.

    Raises:
        MissingPackageError: when Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise MissingPackageError("--engine ray needs the package ray", hint="pip install 'mega-data[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
    folder = os.getcwd()

    def made(shard: Shard) -> str | None:
        os.chdir(folder)  # names are relative to the same, wherever Ray starts its processes
        return make(shard)

    remote = ray.remote(num_cpus=1)(made)
    waiting = list(reversed(shards))
    under_way: dict[Any, Shard] = {}
    while waiting or under_way:
        while waiting and len(under_way) < (workers or len(shards)):
            shard = waiting.pop()
            under_way[remote.remote(shard)] = shard
        done, _ = ray.wait(list(under_way), num_returns=1)
        for reference in done:
            try:
                reason = ray.get(reference)
            except ray.exceptions.RayError as error:
                reason = _reason(error)
            yield under_way.pop(reference), reason


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
