"""Work whose time a client or a model's files decide, in processes that can be ended: chat templates and grammars.

A worker process has a bounded CPU time and memory for each piece of work, and gives way to the engine (`nice`). The
operating system ends it where it takes more; another one is started for the next piece. `worker_tasks` is what it runs.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Collection

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process, to_thread

from mega_common.errors import DataError
from mega_data.chat.records import Conversation
from mega_data.chat.template import ChatTemplate
from mega_eval.grammar import Grammars
from mega_eval.server.worker_tasks import MEMORY, check_within, render_within

SECONDS = 3.0  # of CPU for one piece of work
WALL_SECONDS = 60.0  # for the same, on a busy machine, the start of the process included
PROCESSES = 2  # at once, for each kind of work
KEPT = 256  # grammars whose check is remembered


class Workers:
    """Worker processes of a server.

    Args:
        grammars: of the engine, whose compiled grammars are kept.
        seconds: CPU time of one piece of work.
    """

    def __init__(self, grammars: Grammars | None, seconds: float = SECONDS) -> None:
        self._grammars, self._seconds = grammars, seconds
        self._renderers, self._checkers = CapacityLimiter(PROCESSES), CapacityLimiter(PROCESSES)
        self._compiler, self._any = CapacityLimiter(1), CapacityLimiter(math.inf)
        self._checks: OrderedDict[tuple[str, frozenset[int]], asyncio.Task[None]] = OrderedDict()

    async def render(self, template: ChatTemplate, conversation: Conversation, begins: bool, continues: bool) -> str:
        """Return the text of a conversation by a chat template.

        Raises:
            DataError: when the template refuses it, or takes too long or too much memory.
        """
        try:
            async with self._renderers, asyncio.timeout(WALL_SECONDS):
                return await to_process.run_sync(
                    render_within, self._seconds, template, conversation, begins, continues,
                    cancellable=True, limiter=self._any,
                )  # fmt: skip
        except (BrokenWorkerProcess, MemoryError, TimeoutError):
            raise DataError(
                f"the chat template takes more than {self._seconds:g} seconds or {MEMORY // 2**30} GiB of memory on it"
            ) from None

    async def prepare(self, grammar: str, ends: Collection[int]) -> None:
        """Compile a grammar for the engine, once for all requests that have it.

        Raises:
            DataError: when the grammar cannot be used, or takes too long or too much memory.
            MissingPackageError: when llguidance is not installed.
        """
        if self._grammars is None or self._grammars.has(grammar, ends):
            return
        key = grammar, frozenset(ends)
        if key not in self._checks:
            self._checks[key] = asyncio.ensure_future(self._check(grammar, frozenset(ends)))
        self._checks.move_to_end(key)
        if len(self._checks) > KEPT:
            self._checks.popitem(last=False)
        try:
            await asyncio.shield(self._checks[key])
        except DataError:
            raise
        except Exception:
            self._checks.pop(key, None)
            raise
        await to_thread.run_sync(self._compile, grammar, ends, limiter=self._compiler)

    def _compile(self, grammar: str, ends: Collection[int]) -> None:
        if self._grammars is not None and not self._grammars.has(grammar, ends):
            self._grammars.prepare(grammar, ends)

    async def _check(self, grammar: str, ends: frozenset[int]) -> None:
        assert self._grammars is not None
        try:
            async with self._checkers, asyncio.timeout(WALL_SECONDS):
                await to_process.run_sync(
                    check_within, self._seconds, grammar, self._grammars.tokenizer_json, ends,
                    cancellable=True, limiter=self._any,
                )  # fmt: skip
        except (BrokenWorkerProcess, MemoryError, TimeoutError):
            raise DataError(
                f"the grammar takes more than {self._seconds:g} seconds or {MEMORY // 2**30} GiB of memory to compile",
                hint="use fewer or simpler regular expressions",
            ) from None
