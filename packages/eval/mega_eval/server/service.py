"""What answers have to do with one model: prompts to tokens, bodies to requests of the engine, its events to JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyio import CapacityLimiter, to_thread

from mega_data.chat.records import Conversation
from mega_data.chat.template import ChatTemplate
from mega_data.tokenizer import Tokenizer
from mega_eval.engine import Request
from mega_eval.server.answers import Answer, Chat, Completions, Echo, Format, Part, Usage, event, parts
from mega_eval.server.driver import Driver, Group
from mega_eval.server.errors import Refusal, refusal_of
from mega_eval.server.metrics import Metrics
from mega_eval.server.schemas import ChatRequest, CompletionRequest, Generation, Message, StreamOptions
from mega_eval.server.vocabulary import Vocabulary


@dataclass
class Service:
    """One served model.

    Attributes:
        name: as clients call it.
        version: of mega.
        driver: runs the engine.
        tokenizer: of the model.
        template: of its chats; None: it has none.
        ends: tokens that end a text.
        own: how the model wants tokens drawn where a request does not say.
        max_length: tokens of a prompt and its continuation.
        vocab_size: of the model.
        seconds: for one answer.
        metrics: where tokens are counted.
        adapters: of the model, where each came from by its name, by which clients call the model with it.
    """

    name: str
    version: str
    driver: Driver
    tokenizer: Tokenizer
    template: ChatTemplate | None
    ends: frozenset[int]
    own: Mapping[str, Any]
    max_length: int
    vocab_size: int
    seconds: float
    metrics: Metrics
    adapters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.vocabulary = Vocabulary(self.tokenizer)
        # Encoding takes a hundred times the memory of the text: few at once, and beside the event loop.
        self._encoders = CapacityLimiter(2)

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model than this, without or with one of its adapters."""
        if name not in (None, self.name, *self.adapters):
            raise Refusal(404, f"The model `{name}` does not exist.", param="model", code="model_not_found")

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Tokens of a text, with those around it that the tokenizer puts there (`special`) or without."""

        def run() -> list[int]:
            return self.tokenizer.encode(text, add_special_tokens=special)

        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refusal(400, "a text has half a character (a lone surrogate)") from None
        return await to_thread.run_sync(run, limiter=self._encoders)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones spelt out."""
        largest = max(tokens, default=0)
        if largest >= self.vocab_size:
            raise Refusal(400, f"token {largest} is outside the model's vocabulary of {self.vocab_size}")
        return await to_thread.run_sync(self.tokenizer.decode, tokens, limiter=self._encoders)

    async def chat_prompt(self, messages: Sequence[Message], options: dict[str, object] | None) -> list[int]:
        """Tokens of a conversation, up to where the answer begins."""
        if self.template is None:
            raise Refusal(400, "this model has no chat template", param="messages")
        given = [message.for_template() for message in messages]
        text = self.template.prompt(Conversation(given, [], None, dict(options or {})))
        return await self.encode(text, special=False)

    async def completion(self, body: CompletionRequest) -> Running:
        """Begin a completion."""
        given, prompts = body.prompts(), []
        self.driver.check(len(given) * (body.n or 1))  # before the work of encoding them
        for prompt in given:
            tokens = prompt if isinstance(prompt, list) else await self.encode(prompt, special=body.add_special_tokens)
            prompts.append(tokens)
        echoes: list[Echo | None] = [None] * len(given)
        if body.echo:
            texts = [prompt if isinstance(prompt, str) else await self.decode(prompt) for prompt in given]
            echoes = [Echo(text, tokens) for text, tokens in zip(texts, prompts, strict=True)]
        return await self._begin(body, Completions(self.vocabulary), prompts, echoes)

    async def chat(self, body: ChatRequest) -> Running:
        """Begin an answer in a chat."""
        self.driver.check(body.n or 1)
        prompt = await self.chat_prompt(body.messages, body.chat_template_kwargs)
        return await self._begin(body, Chat(self.vocabulary), [prompt], [None])

    async def _begin(
        self, body: Generation, form: Format, prompts: Sequence[list[int]], echoes: Sequence[Echo | None]
    ) -> Running:
        """Hand `n` requests for each prompt to the engine; choice number j of prompt p is p * n + j."""
        choices, sampling, alternatives = body.n or 1, body.sampling(self.own), body.alternatives()
        requests = [
            Request(
                prompt,
                body.limits(self._new_tokens(prompt, body.new_tokens()), self.ends),
                sampling,
                sample=choice,
                logprobs=alternatives,
                prompt_logprobs=echo is not None and alternatives is not None,
                grammar=body.constraint(),
                adapter=body.model if body.model in self.adapters else None,
            )
            for prompt, echo in zip(prompts, echoes, strict=True)
            for choice in range(choices)
        ]
        answer = Answer(form, body.model or self.name, Usage(sum(map(len, prompts))))
        group = await self.driver.submit(requests)
        told = parts(group.events(), [echo for echo in echoes for _ in range(choices)], alternatives is not None)
        return Running(self, answer, group, told, time.monotonic() + self.seconds)

    def _new_tokens(self, prompt: Sequence[int], asked: int | None) -> int:
        room = self.max_length - len(prompt)
        if room < 1 or (asked or 0) > room:
            more = f" and {asked} new ones" if asked and room > 0 else ""
            raise Refusal(
                400,
                f"This model's maximum context length is {self.max_length} tokens; the prompt has {len(prompt)}{more}.",
                code="context_length_exceeded",
            )
        return asked or room


@dataclass
class Running:
    """An answer that is being made. `close` has to be called, once."""

    service: Service
    answer: Answer
    group: Group
    told: AsyncIterator[Part]
    deadline: float

    def __post_init__(self) -> None:
        self._begun = time.monotonic()

    async def whole(self) -> dict[str, object]:
        """The answer in one piece.

        Raises:
            Refusal: when it takes too long.
        """
        try:
            return await self.answer.whole(self._in_time())
        finally:
            self.close()

    async def chunks(self, options: StreamOptions) -> AsyncIterator[bytes]:
        """The answer as server-sent events; an error is the last of them."""
        try:
            async for chunk in self.answer.chunks(self._in_time(), options):
                yield chunk
        except Exception as error:  # noqa: BLE001 - the status has been sent; here alone it can be told
            yield event(refusal_of(error).body())

    def close(self) -> None:
        """Cancel what still runs."""
        self.service.driver.release(self.group)
        self.service.metrics.tokens(self.answer.usage.prompt, self.answer.usage.completion)

    async def _in_time(self) -> AsyncIterator[Part]:
        """Parts until the time is over. Timers stand around each wait, for what reads may be another task."""
        first = True
        while True:
            try:
                async with asyncio.timeout(self.deadline - time.monotonic()):
                    part = await anext(self.told)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise Refusal(504, f"not done within {self.service.seconds:.0f} seconds") from None
            if first:
                self.service.metrics.first_token(time.monotonic() - self._begun)
            first = False
            yield part
