"""Worker processes for chat templates, grammars and images, whose running time depends on the client or the model's files.

A worker process has limits of CPU time and memory for each task, and a lower priority than the engine (`nice`). The
operating system kills it when it exceeds them; another one starts for the next task. It runs the functions of `worker_tasks`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import BrokenWorkerProcess, CapacityLimiter, to_process, to_thread

from mega_common.errors import DataError
from mega_data.chat.chat_records import Conversation
from mega_data.chat.chat_template import ChatTemplate
from mega_eval.grammar_matcher import GrammarCache
from mega_eval.server.api_errors import ApiRequestError
from mega_eval.server.worker_tasks import (
    MEMORY,
    check_grammar_with_limits,
    prepare_images_with_limits,
    render_with_limits,
)

if TYPE_CHECKING:
    from mega_common.vision_config import VisionConfig
    from mega_data.images.image_pixels import PreparedImage

T = TypeVar("T")

SECONDS = 3.0  # CPU time of one task
WALL_SECONDS = 60.0  # wall-clock time of one task on a busy machine, including the start of the process
EARLY = 0.25  # share of the CPU time in which no task can have used all of it, with all its threads
PROCESSES = 2  # concurrent processes for each kind of task
CACHED_CHECKS = 256  # grammars whose check is cached


class WorkerProcesses:
    """Worker processes that render chat templates, check grammars and read images, with limits of time and memory.

    Args:
        grammars: cache of compiled grammars, shared with the engine.
        seconds: CPU time limit of one task.
    """

    def __init__(self, grammars: GrammarCache | None, seconds: float = SECONDS) -> None:
        self._grammars, self._seconds = grammars, seconds
        self._renderers, self._checkers = CapacityLimiter(PROCESSES), CapacityLimiter(PROCESSES)
        self._compiler, self._any = CapacityLimiter(1), CapacityLimiter(math.inf)
        self._limits = f"{seconds:g} seconds or {MEMORY // 2**30} GiB of memory"
        self._checks: OrderedDict[tuple[str, frozenset[int]], asyncio.Task[None]] = OrderedDict()

    async def render_chat(
        self, template: ChatTemplate, conversation: Conversation, begins: bool, continues: bool
    ) -> str:
        """Return a conversation's prompt text by a chat template, from a worker process; a DataError beyond its limits.
        `begins` appends the start of an answer, and `continues` leaves the last message open.

        Raises:
            DataError: when the template rejects it, or takes too long or too much memory.
        """
        excess = DataError(f"rendering the chat template takes more than {self._limits}")
        return await self._run_task(
            self._renderers, excess, render_with_limits, template, conversation, begins, continues
        )

    async def prepare_images(self, pictures: Sequence[bytes], vision: VisionConfig) -> list[PreparedImage]:
        """Return image files decoded, resized and normalized by a worker process; a DataError beyond its limits.

        Raises:
            DataError: when one cannot be read, has too many pixels, or takes too long or too much memory.
        """
        excess = DataError(f"reading the images takes more than {self._limits}", hint="send smaller images")
        return await self._run_task(self._renderers, excess, prepare_images_with_limits, pictures, vision)

    async def prepare_grammar(self, grammar: str, ends: Collection[int]) -> None:
        """Check a grammar in a worker process and compile it for the engine.
        It is compiled once for all requests that use it; `ends` are the tokens that may end the text.

        Raises:
            DataError: when the grammar cannot be used, or takes too long or too much memory.
            MissingPackageError: when llguidance is not installed.
        """
        if self._grammars is None or self._grammars.has_grammar(grammar, ends):
            return
        key = grammar, frozenset(ends)
        if key not in self._checks:
            self._checks[key] = asyncio.ensure_future(self._check_in_process(grammar, frozenset(ends)))
        self._checks.move_to_end(key)
        if len(self._checks) > CACHED_CHECKS:
            self._checks.popitem(last=False)
        try:
            await asyncio.shield(self._checks[key])
        except DataError:
            raise
        except Exception:
            self._checks.pop(key, None)
            raise
        await to_thread.run_sync(self._compile_grammar, grammar, ends, limiter=self._compiler)

    def _compile_grammar(self, grammar: str, ends: Collection[int]) -> None:
        """Compile a grammar unless it is cached."""
        if self._grammars is not None and not self._grammars.has_grammar(grammar, ends):
            self._grammars.compile_and_cache(grammar, ends)

    async def _check_in_process(self, grammar: str, ends: frozenset[int]) -> None:
        """Check a grammar in a worker process."""
        assert self._grammars is not None
        excess = DataError(
            f"the grammar takes more than {self._limits} to compile", hint="use fewer or simpler regular expressions"
        )
        await self._run_task(
            self._checkers, excess, check_grammar_with_limits, grammar, self._grammars.tokenizer_json, ends
        )

    async def _run_task(
        self, limiter: CapacityLimiter, excess: DataError, task: Callable[..., T], *arguments: Any
    ) -> T:
        """Return the result of a task in a worker process. If the process ends before it can have reached a limit, as one
        that was killed while it was idle, another one repeats the task.

        Raises:
            DataError: `excess`, when the task takes too long or too much memory.
            ApiRequestError: 503 when the machine is too busy to run it.
        """
        for last in (False, True):
            async with limiter:
                begun = time.monotonic()
                try:
                    async with asyncio.timeout(WALL_SECONDS):
                        return await to_process.run_sync(
                            task, self._seconds, *arguments, cancellable=True, limiter=self._any
                        )
                except (BrokenWorkerProcess, TimeoutError) as error:
                    if isinstance(error, TimeoutError) or error.args:  # with a message: the process could not start
                        raise ApiRequestError(
                            503, "the server is too busy to prepare the request", retry_after=10
                        ) from None
                    if last or time.monotonic() - begun > EARLY * self._seconds:
                        raise excess from None
        raise AssertionError("unreachable")
