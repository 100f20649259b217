"""Names the rank that a job hangs on, and ends the job.

A thread of every rank writes into the job's store where its main thread is, and reads what the next rank wrote: one that
has been silent for the configured time is dead or stopped. Rank 0's reads them all: when nobody's main thread has moved
for that long, the ones to blame are those that are not waiting in a collective. Everyone is told and ends; a stopped
process is killed. A store that does not answer is held by a process that is stopped itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from pydantic import BaseModel
from torch.distributed.distributed_c10d import Store

from mega_common.log import logger

CHECKS = 8  # looks within the configured time
TELL_SECONDS = 1.0
# Where a rank stands that waits for others: its host for theirs, or its host for its device, and that for theirs.
WAITING = ("mega_trainer/comm.py", "mega_trainer/device.py")


class Sign(BaseModel):
    """What a rank last wrote: who it is and where its main thread was, since when in seconds.

    `written` is the time of its own clock, which serves to tell a new sign from an old one, and with other ranks' to name
    all that are silent, not to find that one is.
    """

    rank: int
    host: str
    pid: int
    step: int
    where: str
    still: float
    written: float

    def __str__(self) -> str:
        return f"  rank {self.rank} on {self.host}, step {self.step}, was in {self.where}"


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
        self._asking = threading.Thread()
        self._place, self._since = "the start", time.monotonic()  # where the main thread is, since when
        self._last: tuple[float, float] | None = None  # when the next rank's sign was written, and first read

    def __enter__(self) -> Watch:
        self._sign()  # a rank that stops before its thread first looks is known, too
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._asking.ident is not None:
            self._asking.join(self._seconds)
        if not self._asking.is_alive():
            with contextlib.suppress(RuntimeError):
                self._store.set(f"watch/{self._rank}", "")  # a rank that has left is not silent

    def _run(self) -> None:
        asked = time.monotonic()
        while not self._done.wait(self._seconds / CHECKS):
            place, now = _where(sys._current_frames(), self._main or 0), time.monotonic()
            if place != self._place:
                self._place, self._since = place, now
            # A thread of its own: nothing that is asked of a store ends while the process that holds it is stopped.
            if not self._asking.is_alive():
                self._asking, asked = threading.Thread(target=self._ask, daemon=True), now
                self._asking.start()
            elif now - max(asked, self._since) > self._seconds:
                self._end(f"  {_holder(os.environ)} does not answer")

    def _ask(self) -> None:
        try:
            self._sign()
            blamed = self._verdict() or self._judge()
        except RuntimeError:  # the store is gone, and with it the job
            self._done.set()
            return
        if blamed:
            self._end("\n".join(map(str, blamed)), blamed)

    def _sign(self) -> None:
        sign = Sign(
            rank=self._rank, host=socket.gethostname(), pid=os.getpid(), step=self._step(), where=self._place,
            still=time.monotonic() - self._since, written=time.time(),
        )  # fmt: skip
        self._store.set(f"watch/{self._rank}", sign.model_dump_json())

    def _verdict(self) -> list[Sign]:
        if not self._store.check(["watch/verdict"]):
            return []
        return [Sign.model_validate(sign) for sign in json.loads(self._store.get("watch/verdict"))]

    def _judge(self) -> Sequence[Sign]:
        """Whom to blame, if it has come to that. The verdict goes into the store."""
        blamed: Sequence[Sign] = []
        if self._is_silent(following := (self._rank + 1) % self._world_size):
            signs, old = self._signs(range(self._world_size)), time.time() - self._seconds
            blamed = [sign for sign in signs if sign.rank == following or sign.written < old]
        elif self._rank == 0:
            blamed = _standing(self._signs(range(self._world_size)), self._seconds, self._world_size)
        if blamed:
            self._store.set("watch/verdict", json.dumps([sign.model_dump() for sign in blamed]))
        return blamed

    def _is_silent(self, rank: int) -> bool:
        signs, now = self._signs([rank]), time.monotonic()
        if not signs or self._last is None or self._last[0] != signs[0].written:
            self._last = (signs[0].written, now) if signs else None
        return self._last is not None and now - self._last[1] > self._seconds

    def _signs(self, ranks: Sequence[int]) -> list[Sign]:
        """Of those ranks that have begun, and have not left."""
        known = [f"watch/{rank}" for rank in ranks if self._store.check([f"watch/{rank}"])]
        values = self._store.multi_get(known) if known else []
        return [Sign.model_validate_json(value) for value in values if value]

    def _end(self, what: str, blamed: Sequence[Sign] = ()) -> None:
        """Tell, kill what is stopped on this machine, and leave: the main thread may never come back from where it is."""
        logger.error("error: no progress for %g seconds; the job is ended\n%s", self._seconds, what)
        time.sleep(TELL_SECONDS)  # whoever copies this rank's output to the screen should have it before anything dies
        for sign in blamed:
            if sign.host == socket.gethostname() and sign.rank != self._rank:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(sign.pid, signal.SIGKILL)
        time.sleep(2 * self._seconds / CHECKS if self._rank == 0 else 0.0)  # the store may live here: let others read
        os._exit(1)


def _holder(environment: Mapping[str, str]) -> str:
    """The process that the job's store is in."""
    where = environment.get("MASTER_ADDR", "another machine")
    who = "the launcher" if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    return f"{who} on {where}, which holds the job's store,"


def _standing(signs: Sequence[Sign], seconds: float, world_size: int) -> list[Sign]:
    """Whom to blame when all ranks have stood still: those that wait for nobody, or all."""
    if len(signs) < world_size or any(sign.still < seconds for sign in signs):
        return []
    return [sign for sign in signs if not sign.where.startswith(WAITING)] or list(signs)


def _where(frames: Mapping[int, FrameType], main: int) -> str:
    """Where the main thread is; while it waits for autograd's, whose hooks talk to other ranks, where that waits for them."""
    others = (_stack(frame) for thread, frame in frames.items() if thread != main)
    waiting = next((place for place in others if place.startswith(WAITING)), None)
    own = _stack(frames.get(main))
    return own if waiting is None or own.startswith(WAITING) else waiting


def _stack(frame: FrameType | None) -> str:
    """The innermost line of mega's code that a thread is in: `mega_trainer/comm.py:77 all_reduce`."""
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        home = next((index for index, part in enumerate(parts) if part.startswith("mega_")), None)
        if home is not None:
            return f"{'/'.join(parts[home:])}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "code that is not mega's"
