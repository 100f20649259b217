"""Driver that runs the inference engine in its own thread and passes its events to the event loop of the server.

The engine is not thread-safe: additions and cancellations reach it through a queue, between two of its steps, and its events
go back to the event loop after each step. A slow client delays no others; its queue is bounded by the tokens it requested.

A failed request does not affect others. A step that fails as a whole fails all open requests; the engine then restarts with
an empty cache, unless it has failed `MAX_FAILURES` times in a row.
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
from mega_common.progress_logging import logger
from mega_eval.engine_requests import EngineRequest, GenerationEvent
from mega_eval.inference_engine import InferenceEngine
from mega_eval.server.api_errors import ApiRequestError

MAX_FAILURES = 3  # consecutive failed steps, after which the engine is not restarted

LAST_STEP = 30.0  # seconds for the last step when the server ends

T = TypeVar("T")
RowEvent = tuple[int, GenerationEvent]  # index of the request in its group, and its event


class RequestGroup:
    """Engine requests that one API call made, and the queue of their events."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ids: list[int] = []  # request numbers of the engine; only for the engine's thread
        self.loop = asyncio.get_running_loop()
        self.accepted: asyncio.Future[None] = self.loop.create_future()
        self._events: asyncio.Queue[list[RowEvent] | Exception] = asyncio.Queue()

    async def iterate_events(self) -> AsyncIterator[RowEvent]:
        """Yield the engine's events of the group until all its requests are finished; raise the error that ends them.

        Raises:
            ApiRequestError: when the engine has failed or the server ends.
        """
        unfinished = self.size
        while unfinished:
            events = await self._events.get()
            if isinstance(events, Exception):
                raise events
            for event in events:
                yield event
                unfinished -= event[1].finish is not None

    def publish_events(self, events: list[RowEvent] | Exception) -> None:
        """Queue engine events, or the error that ends them, for the coroutine that reads this group of requests.
        It is callable from any thread.
        """
        self._call_in_loop(lambda: self._events.put_nowait(events))

    def report_acceptance(self, error: Exception | None = None) -> None:
        """Report that the engine has accepted the group's requests, or refused them with an error.
        Resolve the future `accepted`, with `error` if they are refused; callable from any thread.
        """
        self._call_in_loop(lambda: self._set_accepted(error))

    def _set_accepted(self, error: Exception | None) -> None:
        """Set the result of `accepted`."""
        if self.accepted.done():  # cancelled, as the client has disconnected
            return
        if error is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(error)

    def _call_in_loop(self, call: Callable[[], None]) -> None:
        """Run `call` in the event loop."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call)


class EngineDriver:
    """Driver that runs an inference engine in a thread of its own.
    It passes requests and events between the engine and asyncio.

    Attributes:
        engine: inference engine; other threads may only read its counts.
        open_requests: number of requests that are waiting or running.
        max_requests: maximum number of open requests.
        failure: error that ended the thread, if any.
    """

    def __init__(self, engine: InferenceEngine, *, max_requests: int) -> None:
        self.engine, self.max_requests = engine, max_requests
        self.open_requests = 0
        self.failure: Exception | None = None
        self._groups: dict[int, tuple[RequestGroup, int]] = {}
        self._busy_since: float | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)

    def start_thread(self) -> None:
        """Start the thread that runs the inference engine."""
        self._thread.start()

    def stop_thread(self, seconds: float = LAST_STEP) -> bool:
        """Stop the engine's thread after the current step and drop open requests; return False if not done in time."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(seconds)
        if self._thread.is_alive():
            logger.error("the engine's step has not ended after %.0f seconds and is abandoned", self.busy_seconds())
            return False
        return True

    def busy_seconds(self) -> float:
        """Return for how many seconds the current step or command of the engine has been running; 0 while it is idle."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def check_capacity(self, count: int) -> None:
        """Raise ApiRequestError if the engine has failed or has no room for `count` more requests."""
        if self.failure is not None:
            raise ApiRequestError(503, "the engine has failed; the server must be restarted")
        if count > self.max_requests:
            message = f"a call must have at most {self.max_requests} choices over all prompts; found {count}"
            raise ApiRequestError(400, message)
        if count and self.open_requests + count > self.max_requests:
            raise ApiRequestError(429, f"the server is busy with {self.open_requests} requests", retry_after=1)

    async def submit_requests(self, requests: Sequence[EngineRequest]) -> RequestGroup:
        """Submit requests to the engine; return their group, which the caller must release, once they are accepted.

        Raises:
            ApiRequestError: when the engine has failed or is full.
            DataError: when one of them is invalid; then none is added.
        """
        self.check_capacity(len(requests))
        group = RequestGroup(len(requests))
        self.open_requests += group.size
        self._commands.put(lambda: self._add_requests(group, requests))
        try:
            await group.accepted
        except BaseException:
            self.release_group(group)
            raise
        return group

    async def run_in_engine_thread(self, work: Callable[[], T]) -> T:
        """Run the function `work` in the engine's thread between two steps, and return its result."""
        self.check_capacity(0)
        done: Future[T] = Future()

        def run_and_set_result() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:  # noqa: BLE001 - the error is for the caller; the engine continues
                    done.set_exception(error)

        self._commands.put(run_and_set_result)
        return await asyncio.wrap_future(done)

    def release_group(self, group: RequestGroup) -> None:
        """Release a group of requests and cancel the unfinished ones; call it exactly once for each group."""
        self.open_requests -= group.size
        self._commands.put(lambda: self._cancel_group(group))

    def abort_all_requests(self, reason: Exception) -> None:
        """Cancel all open requests of the engine and raise `reason` in the readers of their events."""
        self._commands.put(lambda: self._abort_groups(reason))

    def _run_engine(self) -> None:
        """Run engine steps and commands until the end."""
        failures = 0
        while self.failure is None:
            try:
                while self._run_commands():
                    with self._mark_busy():
                        events = self.engine.step(isolate=True)
                    self._dispatch_events(events)
                    failures = 0
                return
            except Exception as error:  # noqa: BLE001 - every open request needs an answer
                failures += 1
                self._recover_engine(error, last=failures == MAX_FAILURES)
        while self._run_commands():  # refuse requests until the server ends
            pass

    def _recover_engine(self, error: Exception, *, last: bool) -> None:
        """Fail the open requests with `error` and reset the engine, unless this was its last allowed failure."""
        logger.error("the engine has failed and %s", "stays down" if last else "restarts", exc_info=error)
        try:
            self.engine.drop_all_requests()
        except Exception as reset_error:  # noqa: BLE001 - an engine that cannot restart stays down
            logger.exception("the engine cannot be restarted")
            error, last = reset_error, True
        self.failure = error if last else None
        groups = {group for group, _ in self._groups.values()}
        self._groups.clear()
        for group in groups:
            group.publish_events(
                ApiRequestError(500, f"the engine has failed ({error}); send the request again", retry_after=1)
            )

    def _run_commands(self) -> bool:
        """Run the queued commands; wait for one while no request is open. Return False at the end."""
        while True:
            try:
                command = self._commands.get(block=not self._groups)
            except queue.Empty:
                return True
            if command is None:
                return False
            with self._mark_busy():
                command()

    @contextlib.contextmanager
    def _mark_busy(self) -> Iterator[None]:
        """Record the start of a step or command."""
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = None

    def _add_requests(self, group: RequestGroup, requests: Sequence[EngineRequest]) -> None:
        """Add the requests of a group to the engine."""
        if group.accepted.done():  # cancelled before its turn
            return
        try:
            self.check_capacity(0)
            for number, request in enumerate(requests):
                added = self.engine.add_request(request)
                group.ids.append(added)
                self._groups[added] = group, number
        except Exception as error:  # noqa: BLE001 - an invalid request must not affect others
            self._cancel_group(group)
            group.report_acceptance(error)
        else:
            group.report_acceptance()

    def _cancel_group(self, group: RequestGroup) -> None:
        """Cancel the unfinished requests of a group."""
        for added in group.ids:
            if self._groups.pop(added, None) is not None:
                self.engine.cancel_request(added)

    def _abort_groups(self, reason: Exception) -> None:
        """Cancel all groups with `reason`."""
        for group in {group for group, _ in self._groups.values()}:
            self._cancel_group(group)
            group.publish_events(reason)

    def _dispatch_events(self, events: Sequence[GenerationEvent]) -> None:
        """Send the events of a step to their groups."""
        published: dict[RequestGroup, list[RowEvent]] = defaultdict(list)
        failed: dict[RequestGroup, Exception] = {}
        for event in events:
            group, number = self._groups[event.request]
            if event.error is not None:
                failed.setdefault(group, event.error)
                continue
            published[group].append((number, event))
            if event.finish is not None:
                del self._groups[event.request]
        for group, new in published.items():
            group.publish_events(new)
        for group, error in failed.items():  # a failed choice ends the other choices of its call
            self._cancel_group(group)
            group.publish_events(
                error if isinstance(error, DataError) else ApiRequestError(500, f"the request has failed ({error})")
            )
