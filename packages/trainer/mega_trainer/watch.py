"""Names the rank that a job hangs on, and ends the job.

A thread of every rank writes into the job's store where its main thread is. Rank 0's reads them all: a rank that has
been silent for the configured time is dead or stopped; when nobody's main thread has moved for that long, the ones to
blame are those that are not waiting in a collective. Everyone is told and ends; a stopped process is killed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from pydantic import BaseModel
from torch.distributed.distributed_c10d import Store

from mega_common.log import logger

CHECKS = 8  # looks within the configured time
TELL_SECONDS = 1.0
WAITING = "mega_trainer/comm.py"  # where a rank stands that waits for the others


class Sign(BaseModel):
    """What a rank last wrote: who it is and where its main thread was, since when in seconds."""

    rank: int
    host: str
    pid: int
    step: int
    where: str
    still: float
    count: int


class Watch:
    """Watches while a `with` block runs.

    Args:
        store: the job's key-value store; used by the thread alone, so give it a connection of its own.
        rank, world_size: this process's place.
        step: tells the step at hand.
        seconds: how long a rank may be silent, or all may stand still, before the job is ended.
    """

    def __init__(self, store: Store, rank: int, world_size: int, step: Callable[[], int], seconds: float) -> None:
        self._store, self._rank, self._world_size, self._step, self._seconds = store, rank, world_size, step, seconds
        self._main = threading.main_thread().ident
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> (count of its last sign, when it was new)

    def __enter__(self) -> Watch:
        self._sign("the start", 0.0, 0)  # a rank that stops before its thread first looks is known, too
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        place, since, count = "", time.monotonic(), 0
        while not self._done.wait(self._seconds / CHECKS):
            stack = _stack(sys._current_frames().get(self._main or 0))
            if stack != place:
                place, since = stack, time.monotonic()
            count += 1
            try:
                self._sign(place, time.monotonic() - since, count)
                blamed = self._look() if self._rank == 0 else self._verdict()
            except RuntimeError:  # the store is gone, and with it the job
                return
            if blamed:
                self._end(blamed)

    def _sign(self, where: str, still: float, count: int) -> None:
        sign = Sign(
            rank=self._rank, host=socket.gethostname(), pid=os.getpid(), step=self._step(),
            where=where, still=still, count=count,
        )  # fmt: skip
        self._store.set(f"watch/{self._rank}", sign.model_dump_json())

    def _look(self) -> list[Sign]:
        """Rank 0: read all signs; whom to blame, if it has come to that. The verdict goes into the store."""
        known = [rank for rank in range(self._world_size) if self._store.check([f"watch/{rank}"])]
        values = self._store.multi_get([f"watch/{rank}" for rank in known])
        signs = [Sign.model_validate_json(value) for value in values]
        blamed = self._silent(signs) or _standing(signs, self._seconds, self._world_size)
        if blamed:
            self._store.set("watch/verdict", json.dumps([sign.model_dump() for sign in blamed]))
        return blamed

    def _silent(self, signs: Sequence[Sign]) -> list[Sign]:
        now = time.monotonic()
        for sign in signs:
            if self._heard.get(sign.rank, (-1, 0.0))[0] != sign.count:
                self._heard[sign.rank] = (sign.count, now)
        return [sign for sign in signs if now - self._heard[sign.rank][1] > self._seconds]

    def _verdict(self) -> list[Sign]:
        if not self._store.check(["watch/verdict"]):
            return []
        return [Sign.model_validate(sign) for sign in json.loads(self._store.get("watch/verdict"))]

    def _end(self, blamed: Sequence[Sign]) -> None:
        """Tell, kill what is stopped on this machine, and leave: the main thread may never come back from where it is."""
        logger.error(
            "error: no progress for %g seconds; the job is ended\n%s",
            self._seconds,
            "\n".join(f"  rank {s.rank} on {s.host}, step {s.step}, was in {s.where}" for s in blamed),
        )
        time.sleep(TELL_SECONDS)  # whoever copies this rank's output to the screen should have it before anything dies
        for sign in blamed:
            if sign.host == socket.gethostname() and sign.rank != self._rank:
                try:
                    os.kill(sign.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(2 * self._seconds / CHECKS if self._rank == 0 else 0.0)  # the store may live here: let others read
        os._exit(1)


def _standing(signs: Sequence[Sign], seconds: float, world_size: int) -> list[Sign]:
    """Whom to blame when all ranks have stood still: those that wait for nobody, or all."""
    if len(signs) < world_size or any(sign.still < seconds for sign in signs):
        return []
    return [sign for sign in signs if WAITING not in sign.where] or list(signs)


def _stack(frame: FrameType | None) -> str:
    """The innermost line of mega's code that a thread is in: `mega_trainer/comm.py:77 all_reduce`."""
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        home = next((index for index, part in enumerate(parts) if part.startswith("mega_")), None)
        if home is not None:
            return f"{'/'.join(parts[home:])}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "code that is not mega's"
