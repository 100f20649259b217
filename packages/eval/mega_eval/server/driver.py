"""Driver of the engine in a thread of its own, and its messages to the event loop of the server.

The engine is not thread-safe: additions and cancellations reach it through a queue, between two of its steps. What it
says goes back to the event loop once a step. So a client that reads slowly holds up nobody: what waits for it is no
more than the tokens it asked for.

A request that fails ends no other. A step that fails as a whole ends the requests of that moment; the engine then starts
again with an empty cache, unless it has failed `MOST_FAILURES` times in a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from mega_common.errors import DataError
from mega_common.log import logger
from mega_eval.engine import Engine, Event, Request
from mega_eval.server.errors import Refusal

MOST_FAILURES = 3  # steps in a row; after these the engine stays down

LAST_STEP = 30.0  # seconds for the last step when the server ends

T = TypeVar("T")
Said = tuple[int, Event]  # number of the request in its group, and what the engine says about it


class Group:
    """Requests that one client made in one call, and what the engine says about them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ids: list[int] = []  # as the engine calls them; belongs to the engine's thread
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self._heard: asyncio.Queue[list[Said] | Exception] = asyncio.Queue()

    async def events(self) -> AsyncIterator[Said]:
        """What the engine says, until all requests are finished.

        Raises:
            Refusal: when the engine has failed or the server ends.
        """
        going = self.size
        while going:
            heard = await self._heard.get()
            if isinstance(heard, Exception):
                raise heard
            for said in heard:
                yield said
                going -= said[1].finish is not None

    def hear(self, said: list[Said] | Exception) -> None:
        """From any thread: pass on what was said, or why nothing more will be."""
        self._in_loop(lambda: self._heard.put_nowait(said))

    def accept(self, error: Exception | None = None) -> None:
        """From any thread: tell whether the engine has taken the requests."""
        self._in_loop(lambda: self._accept(error))

    def _accept(self, error: Exception | None) -> None:
        if self.accepted.done():  # who waited has gone
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(error)

    def _in_loop(self, call: Callable[[], None]) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call)


class Driver:
    """Runs an engine in a thread of its own.

    Attributes:
        engine: only its counts may be read from outside.
        open: requests that are in it or wait for it.
        most: that may be at once.
        failure: the error that ended the thread for good, if any.
    """

    def __init__(self, engine: Engine, *, most: int) -> None:
        self.engine, self.most = engine, most
        self.open = 0
        self.failure: Exception | None = None
        self._groups: dict[int, tuple[Group, int]] = {}
        self._busy_since: float | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self, seconds: float = LAST_STEP) -> bool:
        """End after the step that runs; what is open gets no more. False if that step has not ended after `seconds`."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)
        if self._thread.is_alive():
            logger.error("the engine's step has not ended for %.0f seconds and is given up", self.busy_seconds())
            return False
        return True

    def busy_seconds(self) -> float:
        """Return how long the present step or command of the engine has taken; 0 while there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def check(self, count: int) -> None:
        """Refuse `count` more requests.

        Raises:
            Refusal: when the engine has failed, or has as many as it may.
        """
        if self.failure is not None:
            raise Refusal(503, "the engine has failed; the server has to be started again")
        if count > self.most:
            raise Refusal(400, f"{count} prompts and choices in one call; this server takes {self.most}")
        if count and self.open + count > self.most:
            raise Refusal(429, f"the server is busy with {self.open} requests", retry_after=1)

    async def submit(self, requests: Sequence[Request]) -> Group:
        """Hand over requests; the group that is returned has to be released.

        Raises:
            Refusal: when the engine has failed, or has as many as it may.
            DataError: when one of them cannot be done; then none is.
        """
        self.check(len(requests))
        group = Group(len(requests))
        self.open += group.size
        self._commands.put(lambda: self._add(group, requests))
        try:
            await group.accepted
        except BaseException:
            self.release(group)
            raise
        return group

    async def call(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs in the engine's thread between two steps."""
        self.check(0)
        done: Future[T] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:  # noqa: BLE001 - the error is for the caller; the engine goes on
                    done.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(done)

    def release(self, group: Group) -> None:
        """Forget about requests, and end those that still run. Once for each group."""
        self.open -= group.size
        self._commands.put(lambda: self._cancel(group))

    def abort(self, reason: Exception) -> None:
        """Give up all that is open, and tell its clients why."""
        self._commands.put(lambda: self._give_up(reason))

    def _run(self) -> None:
        failures = 0
        while self.failure is None:
            try:
                while self._obey():
                    with self._busy():
                        events = self.engine.step(isolate=True)
                    self._tell(events)
                    failures = 0
                return
            except Exception as error:  # noqa: BLE001 - every request that waits needs an answer
                failures += 1
                self._recover(error, last=failures == MOST_FAILURES)
        while self._obey():  # until the end: requests that came meanwhile are refused
            pass

    def _recover(self, error: Exception, *, last: bool) -> None:
        """End the open requests with `error` and start the engine again, unless this was its last failure."""
        logger.error("the engine has failed and %s", "stays down" if last else "starts again", exc_info=error)
        try:
            self.engine.reset()
        except Exception as broken:  # noqa: BLE001 - an engine that cannot start again stays down
            logger.exception("the engine cannot start again")
            error, last = broken, True
        self.failure = error if last else None
        groups = {group for group, _ in self._groups.values()}
        self._groups.clear()
        for group in groups:
            group.hear(Refusal(500, f"the engine has failed ({error}); the request may be sent again", retry_after=1))

    def _obey(self) -> bool:
        """Do what was asked; waits while there is nothing else to do. False: the end."""
        while True:
            try:
                command = self._commands.get(block=not self._groups)
            except queue.Empty:
                return True
            if command is None:
                return False
            with self._busy():
                command()

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = None

    def _add(self, group: Group, requests: Sequence[Request]) -> None:
        if group.accepted.done():  # cancelled before its turn
            return
        try:
            self.check(0)
            for number, request in enumerate(requests):
                added = self.engine.add(request)
                group.ids.append(added)
                self._groups[added] = group, number
        except Exception as error:  # noqa: BLE001 - a request that cannot be done ends no other
            self._cancel(group)
            group.accept(error)
        else:
            group.accept()

    def _cancel(self, group: Group) -> None:
        for added in group.ids:
            if self._groups.pop(added, None) is not None:
                self.engine.cancel(added)

    def _give_up(self, reason: Exception) -> None:
        for group in {group for group, _ in self._groups.values()}:
            self._cancel(group)
            group.hear(reason)

    def _tell(self, events: Sequence[Event]) -> None:
        said: dict[Group, list[Said]] = defaultdict(list)
        failed: dict[Group, Exception] = {}
        for event in events:
            group, number = self._groups[event.request]
            if event.error is not None:
                failed.setdefault(group, event.error)
                continue
            said[group].append((number, event))
            if event.finish is not None:
                del self._groups[event.request]
        for group, new in said.items():
            group.hear(new)
        for group, error in failed.items():  # one choice that fails ends the other choices of its call
            self._cancel(group)
            group.hear(error if isinstance(error, DataError) else Refusal(500, f"the request has failed ({error})"))
