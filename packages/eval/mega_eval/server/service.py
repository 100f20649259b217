"""What answers have to do with one model: prompts to tokens, bodies to requests of the engine, its events to JSON."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from anyio import CapacityLimiter, to_thread

from mega_data.chat.records import Conversation
from mega_data.chat.template import ChatTemplate
from mega_data.tokenizer import Tokenizer
from mega_eval.engine import Request
from mega_eval.sampling import Sampling
from mega_eval.server.answers import Answer, Chat, Completions, Echo, Format, Part, Usage, event, parts
from mega_eval.server.driver import Driver, Group
from mega_eval.server.embeddings import Embedder, EmbeddingRequest, batches_of, embedding_body
from mega_eval.server.errors import Refusal, refusal_of
from mega_eval.server.metrics import Metrics
from mega_eval.server.responses import ResponseAnswer, ResponsesRequest
from mega_eval.server.schemas import ChatMessage, ChatPrompt, ChatRequest, CompletionRequest, Generation, StreamOptions
from mega_eval.server.sizes import longest_token
from mega_eval.server.tool_calls import with_tool_calls
from mega_eval.server.tools import FOREIGN, describe_tools
from mega_eval.server.vocabulary import Vocabulary
from mega_eval.server.workers import Workers
from mega_eval.text import Limits

NO_EMBEDDINGS = "embeddings are supported for a decoder on one rank, without an adapter"


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
        embedder: makes vectors of texts; a text says why there is none, None: for this kind of model.
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
    embedder: Embedder | str | None = None

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.vocabulary = Vocabulary(self.tokenizer)
        # Encoding takes a hundred times the memory of the text: few at once, and beside the event loop.
        self._encoders = CapacityLimiter(2)
        self._workers = Workers(getattr(self.driver.engine, "grammars", None))
        self._longest = longest_token(self.tokenizer)

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model than this, without or with one of its adapters."""
        if name not in (None, self.name, *self.adapters):
            raise Refusal(404, f"The model `{name}` does not exist.", param="model", code="model_not_found")

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """Tokens of a text, with those around it that the tokenizer puts there (`special`) or without."""

        def run() -> list[int]:
            # a batch of one: other threads run meanwhile
            ids: list[int] = self.tokenizer.backend.encode_batch([text], add_special_tokens=special)[0].ids
            return ids

        _check_unicode(text)
        return await to_thread.run_sync(run, limiter=self._encoders)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones spelt out."""
        largest = max(tokens, default=0)
        if largest >= self.vocab_size:
            raise Refusal(400, f"token {largest} is outside the model's vocabulary of {self.vocab_size}")
        return await to_thread.run_sync(self.tokenizer.decode, tokens, limiter=self._encoders)

    def token_names(self, tokens: Sequence[int]) -> list[str | None]:
        """Return the entries of tokens in the tokenizer's vocabulary."""
        return [self.tokenizer.backend.id_to_token(token) for token in tokens]

    async def chat_prompt(self, messages: Sequence[ChatMessage], how: ChatPrompt) -> list[int]:
        """Return the tokens of a conversation, up to where the answer begins."""
        if self.template is None:
            raise Refusal(400, "this model has no chat template; use /v1/completions", param="messages")
        given, tools = [message.for_template() for message in messages], self._tools(how)
        if tools and not self.template.renders_tools:
            given, tools = describe_tools(given, tools), []
        going_on = bool(how.continue_final_message)
        begins = how.add_generation_prompt if how.add_generation_prompt is not None else not going_on
        conversation = Conversation(given, [], tools or None, dict(how.chat_template_kwargs or {}))
        text = await self._workers.render(self.template, conversation, begins, going_on)
        if isinstance(how, Generation):
            self._check_size(text, how)
        return await self.encode(text, special=False)

    async def completion(self, body: CompletionRequest) -> Running:
        """Begin a completion."""
        given, prompts = body.prompts(), []
        self.driver.check(len(given) * (body.n or 1))  # before the work of encoding them
        for prompt in given:
            if isinstance(prompt, str):
                self._check_size(prompt, body)
            tokens = prompt if isinstance(prompt, list) else await self.encode(prompt, special=body.add_special_tokens)
            prompts.append(self._truncated(tokens, body))
        echoes: list[Echo | None] = [None] * len(given)
        if body.echo:
            texts = [
                prompt if isinstance(prompt, str) and body.truncate_prompt_tokens is None else await self.decode(tokens)
                for prompt, tokens in zip(given, prompts, strict=True)
            ]
            echoes = [Echo(text, tokens) for text, tokens in zip(texts, prompts, strict=True)]
        return await self._begin(body, self._answer(Completions(self.vocabulary), body.model), prompts, echoes)

    async def chat(self, body: ChatRequest) -> Running:
        """Begin an answer in a chat."""
        self.driver.check(body.n or 1)
        prompt = self._truncated(await self.chat_prompt(body.messages, body), body)
        return await self._begin(body, self._answer(Chat(self.vocabulary), body.model), [prompt], [None])

    async def response(self, body: ResponsesRequest) -> Running:
        """Begin an answer of the Responses API."""
        self.driver.check(1)
        asked = body.chat()
        prompt = await self.chat_prompt(asked.messages, asked)
        return await self._begin(asked, partial(ResponseAnswer, body, body.model or self.name), [prompt], [None])

    def _answer(self, form: Format, model: str | None) -> Callable[[Usage], Answer]:
        return partial(Answer, form, model or self.name)

    async def embeddings(self, body: EmbeddingRequest) -> dict[str, Any]:
        """Return the vectors of texts."""
        embedder = self.embedder
        if not isinstance(embedder, Embedder) or body.model in self.adapters:
            message = embedder if isinstance(embedder, str) else NO_EMBEDDINGS
            raise Refusal(400, message, param="model")
        if body.dimensions not in (None, embedder.width):
            message = f"dimensions must be {embedder.width}, the width of the model's vectors; found {body.dimensions}"
            raise Refusal(400, message, param="dimensions")
        texts = [await self._text_to_embed(embedder, text) for text in body.texts()]
        vectors = [await self.driver.call(partial(embedder, batch)) for batch in batches_of(texts)]
        tokens_read = sum(map(len, texts))
        self.metrics.tokens(tokens_read, 0)
        return embedding_body(np.concatenate(vectors), body.model or self.name, tokens_read, body.encoding_format)

    async def _text_to_embed(self, embedder: Embedder, text: str | list[int]) -> list[int]:
        """Return the tokens of a text to embed."""
        if not text:
            raise Refusal(400, "input must not have an empty text", param="input")
        if isinstance(text, list) and embedder.prompt:
            message = (
                f"input must be text, since the model puts its prompt {embedder.prompt!r} in front; found token ids"
            )
            raise Refusal(400, message, param="input")
        if isinstance(text, str):
            _check_unicode(text)
            text = await to_thread.run_sync(embedder.encode, text, limiter=self._encoders)
        self._check_tokens(text, "input")
        most = min(self.max_length, embedder.texts.model.config.max_position)
        if embedder.declared:
            most = min(most, embedder.texts.max_length)
        if len(text) > most:
            raise Refusal(
                400,
                f"This model's maximum context length is {most} tokens; a text of input has {len(text)}.",
                param="input",
                code="context_length_exceeded",
            )
        if not text:
            raise Refusal(400, "input must not have an empty text: one has no tokens", param="input")
        return text

    def tokenizer_info(self) -> dict[str, str | None]:
        """Return the special tokens and the chat template, by the names of tokenizer_config.json."""
        begin = None if self.tokenizer.bos_id is None else self.vocabulary[self.tokenizer.bos_id].text
        facts = {} if self.template is None else self.template.facts()
        none = {"pad_token": None, "chat_template": None}
        return {**none, "bos_token": begin, "eos_token": self.tokenizer.eos_token, **facts}

    def _tools(self, how: ChatPrompt) -> list[dict[str, Any]]:
        """Return the tools of a chat, as templates expect them."""
        found = how.callable_tools() if isinstance(how, ChatRequest) else []
        if found and self.template is not None and self.template.renders_tools:
            foreign = FOREIGN.search(self.template.facts()["chat_template"])
            if foreign:
                raise Refusal(
                    400,
                    f"tools are not supported with this chat template, whose calls begin with {foreign[0]!r}",
                    param="tools",
                )
        return [tool.model_dump(exclude_none=True) for tool in found]

    def _check_size(self, text: str, body: Generation) -> None:
        """Refuse a text with more bytes than the model's longest prompt can have, before it is encoded."""
        if self._longest is None or body.truncate_prompt_tokens is not None:
            return
        size, most = len(text.encode(errors="replace")), self._longest * self.max_length
        if size > most:
            raise Refusal(
                400,
                f"This model's maximum context length is {self.max_length} tokens, of {most} bytes at most; "
                f"the prompt has {size} bytes.",
                code="context_length_exceeded",
            )

    def _truncated(self, prompt: list[int], body: Generation) -> list[int]:
        """Return the last `truncate_prompt_tokens` of a prompt; -1: as many as leave room for the answer."""
        kept = body.truncate_prompt_tokens
        if kept == -1:
            kept = max(1, self.max_length - (body.new_tokens() or 1))
        return prompt if kept is None else prompt[-kept:]

    async def _begin(
        self,
        body: Generation,
        answer_for: Callable[[Usage], Answer | ResponseAnswer],
        prompts: Sequence[list[int]],
        echoes: Sequence[Echo | None],
    ) -> Running:
        """Hand `n` requests for each prompt to the engine; choice number j of prompt p is p * n + j."""
        choices, alternatives, asked = body.n or 1, body.alternatives(), self._limits(body)
        sampling = await self._sampling(body, asked)
        if (grammar := body.constraint()) is not None:
            await self._workers.prepare(grammar, asked.ends)
        requests = [
            Request(
                prompt,
                replace(asked, max_new_tokens=self._new_tokens(prompt, body.new_tokens()) or 1),
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
        answer = answer_for(Usage(sum(map(len, prompts))))
        group = await self.driver.submit(requests)
        told = parts(
            group.events(), [echo for echo in echoes for _ in range(choices)], alternatives is not None,
            echo_only=body.new_tokens() == 0,
        )  # fmt: skip
        if isinstance(body, ChatRequest) and (tools := body.callable_tools()):
            told = with_tool_calls(told, frozenset(tool.function.name for tool in tools))
        return Running(self, answer, group, told, time.monotonic() + self.seconds)

    def _limits(self, body: Generation) -> Limits:
        """Return what ends the texts of a request; a stop string that is a special token is a stop token."""
        strings, tokens = list(body.stop_strings()), set(body.stop_token_ids or ())
        if body.skip_special_tokens is not False:  # else special tokens are in the text
            tokens |= {self.vocabulary.specials[stop] for stop in strings if stop in self.vocabulary.specials}
            strings = [stop for stop in strings if stop not in self.vocabulary.specials]
            mixed = [(stop, name) for stop in strings for name in self.vocabulary.specials if name in stop]
            if mixed:
                stop, name = mixed[0]
                message = f"stop mixes the special token {name!r} with other text ({stop!r}); send {name!r} alone"
                raise Refusal(400, message, param="stop")
        self._check_tokens(body.stop_token_ids or (), "stop_token_ids")
        least, most = body.min_tokens or 0, body.new_tokens()
        if most is not None and least > most:
            raise Refusal(400, f"min_tokens ({least}) must be at most the maximum of {most} tokens", param="min_tokens")
        return Limits(
            stop=strings,
            ends=() if body.ignore_eos else self.ends,
            stop_tokens=frozenset(tokens),
            min_new_tokens=least,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
        )

    async def _sampling(self, body: Generation, limits: Limits) -> Sampling:
        """Return how tokens are drawn: a field of the request replaces the same setting of the model's own files."""
        self._check_tokens([int(token) for token in body.logit_bias or ()], "logit_bias")
        self._check_tokens(body.allowed_token_ids or (), "allowed_token_ids")
        ends = {*limits.ends, *limits.stop_tokens}
        if body.min_tokens and body.allowed_token_ids and ends.issuperset(body.allowed_token_ids):
            message = "min_tokens requires an allowed token that does not end the text; allowed_token_ids has none"
            raise Refusal(400, message, param="allowed_token_ids")
        own: dict[str, Any] = {**self.own, "min_length_ends": sorted(ends)}
        if body.min_tokens is not None:
            own |= {"min_new_tokens": body.min_tokens, "min_length": 0}
        if body.bad_words is not None:
            own["bad_words_ids"] = [tokens for word in body.bad_words for tokens in await self._spellings(word)]
        return body.sampling(own)

    async def _spellings(self, word: str) -> list[list[int]]:
        """Return the token sequences of a word at the start of a text and behind a space, as vLLM bans them."""
        plain, behind = [await self.encode(text, special=False) for text in (word, f" {word.lstrip()}")]
        alike = len(plain) == len(behind) and plain[:1] != behind[:1]
        return [tokens for tokens in ([plain, behind] if alike else [plain]) if tokens]

    def _check_tokens(self, tokens: Collection[int], field: str) -> None:
        largest = max(tokens, default=0)
        if largest >= self.vocab_size:
            message = f"{field} has token {largest}, which is outside the model's vocabulary of {self.vocab_size}"
            raise Refusal(400, message, param=field)

    def _new_tokens(self, prompt: Sequence[int], asked: int | None) -> int:
        """Return the most tokens that may follow a prompt; 0 where 0 were asked for."""
        room = self.max_length - len(prompt)
        if room < (asked != 0) or (asked or 0) > room:
            more = f" and {asked} new ones" if asked and room > 0 else ""
            raise Refusal(
                400,
                f"This model's maximum context length is {self.max_length} tokens; the prompt has {len(prompt)}{more}.",
                code="context_length_exceeded",
            )
        return room if asked is None else asked


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refusal(400, "a text has half a character (a lone surrogate)") from None


@dataclass
class Running:
    """An answer that is being made. `close` has to be called, once."""

    service: Service
    answer: Answer | ResponseAnswer
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
