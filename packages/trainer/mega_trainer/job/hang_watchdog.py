"""Watchdog that names the rank on which a job hangs, and ends the job.

A thread of every rank writes the position of its main thread into the job's store as a heartbeat, and reads the heartbeat of
the next rank: a rank without a heartbeat for the configured time is dead or stopped. The thread of rank 0 reads all
heartbeats: if no main thread has moved for that time, the ranks that do not wait in a collective are at fault. The verdict is
written to the store, and all ranks end; a stopped process is killed. A store that does not answer belongs to a process that
is stopped itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from pydantic import BaseModel
from torch.distributed.distributed_c10d import Store

from mega_common.atomic_files import open_atomic_file
from mega_common.progress_logging import logger
from mega_trainer.job.error_log import RANKS, record_error
from mega_trainer.job.rank_position import (
    RankCodePosition,
    StackLine,
    describe_wait,
    format_stack,
    main_thread_position,
    read_flight_record,
    read_thread_stacks,
)

CHECKS = 8  # heartbeats within the configured time, at least
LONG, WRITER = (
    ("evaluate", "save"),
    "checkpoint",
)  # phases, and a prefix of thread names, that may take long without progress of the main thread
HEARTBEAT_SECONDS = 5.0  # between heartbeats, at most
STILL_SECONDS = 1.0  # of waiting, after which a heartbeat names the group
OBSERVE_SECONDS = 0.5  # between observations of the main thread, each of which takes 0.6 ms
OUTPUT_SECONDS = 1.0  # for the error to reach the screen
MIN_OBSERVATIONS = 40  # before a rank can be a straggler
STRAGGLER_SHARE = 0.25  # of all time, by which a straggler works more than the median rank


class RankHeartbeat(BaseModel):
    """Last heartbeat of a rank: its identity, the position of its main thread, and the seconds since that thread moved.

    Attributes:
        still: seconds since the main thread moved.
        written: monotonic clock of the rank's machine. Other ranks only compare it with the previous value: the age of a
            heartbeat is counted from when a reader saw it change (`HeartbeatChanges`).
        looks: number of observations at work in each phase, and under "" of waiting for other ranks.
        stack: of a main thread that has not moved for long.
    """

    rank: int
    host: str
    pid: int
    step: int
    at: RankCodePosition
    still: float
    written: float
    looks: dict[str, int] = {}
    stack: list[str] = []

    def __str__(self) -> str:
        lines = [f"  rank {self.rank} on {self.host}, step {self.step}, was {self.at}"]
        return "\n".join([*lines, *(f"    | {line}" for line in self.stack)])

    def busy_share(self, phase: str | None = None) -> float:
        """Return the share of observations, 0 to 1, in which the rank was at work and not waiting for other ranks.
        With `phase`, count only work in that phase of the step; without it, work in any phase.
        """
        work = sum(count for name, count in self.looks.items() if (name if phase is None else name == phase))
        return work / max(1, self.observation_count)

    @property
    def observation_count(self) -> int:
        """Number of times that the rank's main thread was observed, at work or waiting."""
        return sum(self.looks.values())


class HeartbeatChanges:
    """Record of when each rank's heartbeat last changed.
    Times are by the monotonic clock of this process, since clocks of machines may differ.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float]] = {}  # by rank: `written`, and the time of its first reading

    def record_heartbeats(self, ranks: Sequence[int], signs: Sequence[RankHeartbeat], now: float) -> None:
        """Record the heartbeats `signs` read from `ranks` at time `now`.
        Ranks without a heartbeat, which have not begun or have left, are forgotten.
        """
        written = {sign.rank: sign.written for sign in signs}
        for rank in ranks:
            if rank not in written:
                self._seen.pop(rank, None)
            elif rank not in self._seen or self._seen[rank][0] != written[rank]:
                self._seen[rank] = written[rank], now

    def silent_seconds(self, rank: int, now: float) -> float:
        """Return the seconds since the heartbeat of `rank` last changed; 0 for a rank whose heartbeat was not read."""
        return now - self._seen[rank][1] if rank in self._seen else 0.0


class HangWatchdog:
    """Context manager whose thread ends the job if a rank is silent, or all ranks stand still, for too long.

    Args:
        store: a separate connection to the job's key-value store, used only by the watchdog's thread.
        rank, world_size: of this process.
        step, phase: return the current step and phase.
        seconds: how long a rank may be silent, or all may make no progress, before the job is ended.
        output: the run's folder, for errors, for torch's flight record of a rank (in `logs`), and for the states of all
            ranks, `ranks.json`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        step: Callable[[], int],
        phase: Callable[[], str],
        seconds: float,
        output: Path,
    ) -> None:
        self._store, self._rank, self._world_size, self._seconds = store, rank, world_size, seconds
        self._step, self._phase = step, phase
        self._main = threading.main_thread().ident
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch_loop, name="watch", daemon=True)
        self._request = threading.Thread()
        # position of the main thread, and since when; an equal position in another step has moved
        self._position, self._since = RankCodePosition(where="the start", phase=""), time.monotonic()
        self._at_step, self._lines = step(), tuple[StackLine, ...]()
        self._looks, self._slow, self._output = Counter[str](), frozenset[int](), output
        self._changes = HeartbeatChanges()

    def __enter__(self) -> HangWatchdog:
        self._send_heartbeat()  # so that a rank that stops before its thread starts is known
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._request.ident is not None:
            self._request.join(self._seconds)
        if not self._request.is_alive():
            with contextlib.suppress(RuntimeError):
                self._store.set(f"watch/{self._rank}", "")  # a rank that has left is not silent

    def _watch_loop(self) -> None:
        requested = signed = time.monotonic()
        every = min(self._seconds / CHECKS, HEARTBEAT_SECONDS)
        while not self._done.wait(min(OBSERVE_SECONDS, every)):
            now = time.monotonic()
            self._observe_main_thread(now)
            if now - signed < every:
                continue
            signed = now
            # in a separate thread: a request to the store does not return while the process that holds it is stopped
            if not self._request.is_alive():
                self._request, requested = threading.Thread(target=self._check_ranks, daemon=True), now
                self._request.start()
            elif now - max(requested, self._since) > self._seconds:
                self._end_job(f"  {_store_holder(os.environ)} does not answer")

    def _observe_main_thread(self, now: float) -> None:
        """Record the position of the main thread."""
        lines_of, main = read_thread_stacks(), self._main or 0
        position = main_thread_position(lines_of, main, self._phase())
        self._looks["" if position.waits else position.phase or "the step"] += 1
        lines: tuple[StackLine, ...] = ()
        # tasks run code of the harness; a save may wait for the one before, which a thread writes
        if position.phase in LONG:
            writers = [thread.ident or 0 for thread in threading.enumerate() if thread.name.startswith(WRITER)]
            lines = tuple(line for thread in (main, *writers) for line in lines_of.get(thread, ()))
        if (step := self._step(), position, lines) != (self._at_step, self._position, self._lines):
            self._at_step, self._position, self._lines, self._since = step, position, lines, now

    def _check_ranks(self) -> None:
        try:
            self._send_heartbeat()
            blamed = self._read_verdict() or self._find_culprits()
        except RuntimeError:  # the store is gone, and with it the job
            self._done.set()
            return
        if blamed:
            self._end_job("\n".join(map(str, blamed)), blamed)

    def _send_heartbeat(self) -> None:
        still = time.monotonic() - self._since
        lines = read_thread_stacks().get(self._main or 0, []) if still > self._seconds / 2 else []
        position = self._position
        if position.waits and still > STILL_SECONDS:
            position = position.model_copy(update={"waits": describe_wait(position)})
        sign = RankHeartbeat(
            rank=self._rank, host=socket.gethostname(), pid=os.getpid(), step=self._step(), at=position,
            still=still, written=time.monotonic(), looks=dict(self._looks), stack=format_stack(lines),
        )  # fmt: skip
        self._store.set(f"watch/{self._rank}", sign.model_dump_json())

    def _read_verdict(self) -> list[RankHeartbeat]:
        if not self._store.check(["watch/verdict"]):
            return []
        return [RankHeartbeat.model_validate(sign) for sign in json.loads(self._store.get("watch/verdict"))]

    def _find_culprits(self) -> Sequence[RankHeartbeat]:
        """Return the heartbeats of the ranks that block the job, empty if none do. The verdict goes into the store.

        All ranks are read once the next rank has been silent for a quarter of the time; those that are silent for half of the
        time are at fault as well.
        """
        blamed: Sequence[RankHeartbeat] = []
        following = (self._rank + 1) % self._world_size
        suspects = self._changes.silent_seconds(following, time.monotonic()) > self._seconds / 4
        ranks = range(self._world_size) if suspects or self._rank == 0 else [following]
        signs, now = self._read_heartbeats(ranks), time.monotonic()
        self._changes.record_heartbeats(ranks, signs, now)
        if self._changes.silent_seconds(following, now) > self._seconds:
            silent = [rank for rank in ranks if self._changes.silent_seconds(rank, now) > self._seconds / 2]
            blamed = [sign for sign in signs if sign.rank in silent]
        elif self._rank == 0:
            blamed = _blocking_ranks(signs, self._seconds, self._world_size)
            self._log_stragglers(signs)
            self._write_rank_states(signs)
        if blamed:
            self._store.set("watch/verdict", json.dumps([sign.model_dump() for sign in blamed]))
        return blamed

    def _log_stragglers(self, signs: Sequence[RankHeartbeat]) -> None:
        """Log the stragglers that the others wait for, when new ones appear."""
        slow = find_stragglers(signs)
        if slow.keys() - self._slow:
            logger.warning("\n".join(["stragglers, for which the other ranks wait:", *slow.values()]))
        self._slow = frozenset(slow)

    def _write_rank_states(self, signs: Sequence[RankHeartbeat]) -> None:
        """Write the state of all ranks for `mega top`; `heard` is the arrival time of a heartbeat, by the local clock."""
        now, here = time.monotonic(), time.time()
        lines = [
            {"rank": sign.rank, "host": sign.host, "step": sign.step, "phase": sign.at.phase, "waits": sign.at.waits,
             "still": sign.still, "heard": here - self._changes.silent_seconds(sign.rank, now)}
            for sign in signs
        ]  # fmt: skip
        with contextlib.suppress(OSError), open_atomic_file(self._output / RANKS, text=True) as stream:
            json.dump(lines, stream)

    def _read_heartbeats(self, ranks: Sequence[int]) -> list[RankHeartbeat]:
        """Return the heartbeats of ranks that have begun and not left."""
        known = [f"watch/{rank}" for rank in ranks if self._store.check([f"watch/{rank}"])]
        values = self._store.multi_get(known) if known else []
        return [RankHeartbeat.model_validate_json(value) for value in values if value]

    def _end_job(self, cause: str, blamed: Sequence[RankHeartbeat] = ()) -> None:
        """Log the error, kill stopped processes on this machine, and exit: the main thread may never return."""
        message = f"no progress for {self._seconds:g} seconds (timeout_seconds); the job is ended\n{cause}"
        logger.error("error: %s", message)
        record_error(self._output, self._rank, message)
        if record := read_flight_record():
            with contextlib.suppress(OSError):
                logs = self._output / "logs"
                logs.mkdir(parents=True, exist_ok=True)
                (logs / f"flight-record-rank{self._rank}.json").write_text(record)
        time.sleep(OUTPUT_SECONDS)  # for a process that copies this rank's output to the screen
        for sign in blamed:
            if sign.host == socket.gethostname() and sign.rank != self._rank:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(sign.pid, signal.SIGKILL)
        # rank 0 may hold the store: let others read the verdict
        time.sleep(2 * self._seconds / CHECKS if self._rank == 0 else 0.0)
        os._exit(1)


def _store_holder(environment: Mapping[str, str]) -> str:
    """Return a text that names the process holding the job's store."""
    where = environment.get("MASTER_ADDR", "another machine")
    holder = "the launcher" if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
    return f"{holder} on {where}, which holds the job's store,"


def _blocking_ranks(signs: Sequence[RankHeartbeat], seconds: float, world_size: int) -> list[RankHeartbeat]:
    """Return the ranks at fault when no rank makes progress: those that do not wait; if all wait, the fewest that wait
    at a different position; if all positions are equal, all ranks.
    """
    if len(signs) < world_size or any(sign.still < seconds for sign in signs):
        return []
    if working := [sign for sign in signs if not sign.at.waits]:
        return working
    positions = Counter((sign.step, sign.at.where) for sign in signs)
    fewest = min(positions.values())
    return [sign for sign in signs if positions[sign.step, sign.at.where] == fewest]


def find_stragglers(signs: Sequence[RankHeartbeat]) -> dict[int, str]:
    """Return {rank: line of text} for the straggler ranks, which work while most others wait.
    The line names the phase with the largest difference.
    """
    if len(signs) < 2 or any(sign.observation_count < MIN_OBSERVATIONS for sign in signs):
        return {}
    usual = median(sign.busy_share() for sign in signs)
    found = {}
    for sign in signs:
        if sign.busy_share() > usual + STRAGGLER_SHARE:
            others = {phase: median(each.busy_share(phase) for each in signs) for phase in sign.looks if phase}
            phase = max(others, key=lambda name: sign.busy_share(name) - others[name])
            found[sign.rank] = (
                f"  rank {sign.rank} on {sign.host} works {sign.busy_share():.0%} of the time, the median rank {usual:.0%}; "
                f"most of that in {phase}: {sign.busy_share(phase):.0%} against {others[phase]:.0%}"
            )
    return found
