"""Answer to a request while its text is generated: complete or as server-sent events, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from mega_eval.server.answer_formats import AnswerWriter, ChoiceDelta
from mega_eval.server.api_errors import ApiRequestError, convert_to_api_error
from mega_eval.server.engine_driver import EngineDriver, RequestGroup
from mega_eval.server.request_schemas import StreamOptions
from mega_eval.server.server_metrics import ServerMetrics


@dataclass
class RunningAnswer:
    """Answer to an API request, generated within `seconds`; after `stream_chunks` the caller must `release_requests`."""

    answer: AnswerWriter
    group: RequestGroup
    parts: AsyncIterator[ChoiceDelta]
    driver: EngineDriver
    metrics: ServerMetrics
    seconds: float

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._deadline = self._start + self.seconds

    async def build_answer(self) -> dict[str, object]:
        """Wait until the generation ends, release its requests, and return the complete answer as a JSON object.

        Raises:
            ApiRequestError: when it takes too long.
        """
        try:
            return await self.answer.build_answer(self._parts_until_deadline())
        finally:
            self.release_requests()

    async def stream_chunks(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events while it is generated; an error is sent as the last event."""
        try:
            async for chunk in self.answer.stream_chunks(self._parts_until_deadline(), options):
                yield chunk
        except Exception as error:  # noqa: BLE001 - the status is already sent, so the error must be an event
            yield self.answer.format_stream_error(convert_to_api_error(error))

    def release_requests(self) -> None:
        """Cancel the answer's unfinished engine requests and count its tokens in the server's metrics."""
        self.driver.release_group(self.group)
        self.metrics.record_tokens(self.answer.usage.prompt, self.answer.usage.completion)

    async def _parts_until_deadline(self) -> AsyncIterator[ChoiceDelta]:
        """Yield parts until the deadline; each wait has its own timer, since the reader may be another task."""
        first = True
        while True:
            try:
                async with asyncio.timeout(self._deadline - time.monotonic()):
                    part = await anext(self.parts)
            except StopAsyncIteration:
                return
            except TimeoutError:
                message = f"the answer was not finished within {self.seconds:.0f} seconds"
                raise ApiRequestError(504, message) from None
            if first:
                self.metrics.record_first_token(time.monotonic() - self._start)
            first = False
            yield part
