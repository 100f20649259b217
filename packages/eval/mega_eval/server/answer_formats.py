"""Conversion of engine events to the JSON of OpenAI's API, as a whole answer or as a stream of chunks.

Both use the same parts, so the joined chunks of a stream equal the whole answer.
"""

from __future__ import annotations

import codecs
import json
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from mega_eval.engine_requests import GenerationEvent, ScoredToken
from mega_eval.server.api_errors import ApiRequestError
from mega_eval.server.request_schemas import StreamOptions
from mega_eval.server.token_spelling import LogprobToken, Vocabulary

TokenEvent = tuple[int, ScoredToken | None]  # a token and its log-probabilities; None for the first token of a prompt

FinishReason = Literal["stop", "length", "tool_calls"]
FINISH: dict[str | None, FinishReason] = {"end": "stop", "stop": "stop", "length": "length"}


class EchoedPrompt(NamedTuple):
    """Prompt (text and token ids) that a completion repeats at the beginning of its answer, by the field `echo`."""

    text: str
    tokens: Sequence[int]


@dataclass
class ToolCallDelta:
    """New piece of one function call of a choice.
    `index` is the number of the call; the first piece has its name and id, and all have JSON text of its arguments.
    """

    index: int
    name: str | None = None
    id: str | None = None
    arguments: str = ""

    def format_call(self) -> dict[str, Any]:
        """Return this piece of a function call as JSON of OpenAI's API, without the index."""
        head = {} if self.name is None else {"id": self.id, "type": "function"}
        name = {} if self.name is None else {"name": self.name}
        return {**head, "function": {**name, "arguments": self.arguments}}


@dataclass
class ChoiceDelta:
    """Newly generated content of one choice of an API answer: text, tokens, finish reason and function calls.

    Attributes:
        choice: index of the choice in the answer.
        text: new text.
        tokens: new tokens with log-probabilities, or None if these were not requested.
        count: number of new tokens.
        finish: finish reason of the API, in the last part.
        begins: True for the first part of a choice.
        stop: stop string or stop token that ended the choice, in the last part.
        reasoning: new text of the model's reasoning, which is not part of `text`.
        calls: new pieces of function calls.
    """

    choice: int
    text: str
    tokens: list[TokenEvent] | None
    count: int
    finish: FinishReason | None
    begins: bool
    stop: str | int | None = None
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)

    def append_delta(self, more: ChoiceDelta) -> None:
        """Append the content of `more`, which follows in the same choice of an answer, in place."""
        self.text += more.text
        self.reasoning += more.reasoning
        self.count += more.count
        self.finish, self.stop = more.finish, more.stop
        for delta in more.calls:
            self.add_call_delta(delta)
        if self.tokens is not None:
            self.tokens += more.tokens or []

    def add_call_delta(self, delta: ToolCallDelta) -> None:
        """Add a piece of a function call, joined to the last piece if that is of the same call."""
        if self.calls and self.calls[-1].index == delta.index:
            self.calls[-1].arguments += delta.arguments
        else:
            self.calls.append(delta)


@dataclass
class TokenUsage:
    """Counts of prompt tokens and of completion tokens of one answer so far."""

    prompt: int
    completion: int = 0

    def format_usage(self) -> dict[str, int]:
        """Return the token counts as the JSON object `usage` of OpenAI's API."""
        total = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": total}


class AnswerFormat(Protocol):
    """Interface of the JSON formats of /v1/completions and /v1/chat/completions."""

    prefix: str
    whole: str
    chunk: str

    def format_choice(self, part: ChoiceDelta) -> dict[str, Any]:
        """Return an item of the JSON list `choices` for a whole answer."""

    def format_delta(self, part: ChoiceDelta) -> dict[str, Any]:
        """Return an item of the JSON list `choices` for a streamed chunk of an answer."""


class AnswerWriter(Protocol):
    """Interface of classes that build the server's answers, one class for each HTTP API.

    Attributes:
        usage: token counts so far.
    """

    usage: TokenUsage

    async def build_answer(self, parts: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        """Collect all parts and return the complete answer of the HTTP API as a JSON object."""

    def stream_chunks(self, parts: AsyncIterator[ChoiceDelta], options: StreamOptions) -> AsyncIterator[bytes]:
        """Yield the answer as the server-sent events of the HTTP API."""

    def format_stream_error(self, error: ApiRequestError) -> bytes:
        """Return the server-sent event by which the HTTP API reports an error in a stream."""


class TokenTextOffsets:
    """Counter of the character offsets of tokens in the text of one choice, for the field `text_offset`.

    A token inside a character has the offset of that character. Special tokens count only if the text includes them.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next_offsets(self, tokens: Sequence[LogprobToken], text: str) -> list[int]:
        """Return the character offset of each of the next tokens of a choice in its text.
        `tokens` are the next tokens, and `text` is the text that they add.
        """
        self._text += text
        found = []
        for token in tokens:
            found.append(self._at)
            self._at += len(self._shown_text(token))
        return found

    def _shown_text(self, token: LogprobToken) -> str:
        """Return the text of a token as it appears in the answer."""
        if token.special:
            return token.text if token.text and self._text.startswith(token.text, self._at) else ""
        piece = self._decoder.decode(token.raw)
        if self._at == 0 and not self._text.startswith(piece):
            return piece.lstrip(" ")  # SentencePiece drops a leading space
        return piece


@dataclass
class CompletionAnswerFormat:
    """Format of the JSON answers of /v1/completions."""

    vocabulary: Vocabulary
    prefix = "cmpl-"
    whole = chunk = "text_completion"
    _offsets: defaultdict[int, TokenTextOffsets] = field(default_factory=lambda: defaultdict(TokenTextOffsets))

    def format_choice(self, part: ChoiceDelta) -> dict[str, Any]:
        """Return an item of the JSON list `choices`, for a whole answer or a streamed chunk of /v1/completions."""
        logprobs = None if part.tokens is None else self._format_logprobs(part, part.tokens)
        return {
            "index": part.choice, "text": part.text, "logprobs": logprobs, "finish_reason": part.finish,
            "stop_reason": part.stop,
        }  # fmt: skip

    format_delta = format_choice

    def _format_logprobs(self, part: ChoiceDelta, tokens: Sequence[TokenEvent]) -> dict[str, Any]:
        """Return the log-probabilities of a part in the form of the API."""
        texts = [self.vocabulary[token] for token, _ in tokens]
        return {
            "tokens": [text.completion_spelling for text in texts],
            "token_logprobs": [scored and clip_logprob(scored.logprob) for _, scored in tokens],
            "top_logprobs": [scored and self._format_alternatives(scored) for _, scored in tokens],
            "text_offset": self._offsets[part.choice].next_offsets(texts, part.text),
        }

    def _format_alternatives(self, scored: ScoredToken) -> dict[str, float]:
        """Return the most likely tokens and the chosen token by text; of tokens with equal text the most likely."""
        found: dict[str, float] = {}
        for token, logprob in [*scored.top, (scored.token, scored.logprob)]:
            found.setdefault(self.vocabulary[token].completion_spelling, clip_logprob(logprob))
        return found


@dataclass
class ChatAnswerFormat:
    """Format of the JSON answers of /v1/chat/completions."""

    vocabulary: Vocabulary
    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def format_choice(self, part: ChoiceDelta) -> dict[str, Any]:
        """Return an item of the JSON list `choices` with a `message`, for a whole chat answer."""
        calls = {"tool_calls": [call.format_call() for call in part.calls]} if part.calls else {}
        reasoning = {"reasoning_content": part.reasoning} if part.reasoning else {}
        message = {"role": "assistant", "content": part.text or (None if calls else ""), **reasoning, **calls}
        return {"index": part.choice, "message": message, **self._common_fields(part)}

    def format_delta(self, part: ChoiceDelta) -> dict[str, Any]:
        """Return an item of the JSON list `choices` with a `delta`, for a streamed chat chunk.
        The first delta of a choice has the role.
        """
        role = {"role": "assistant"} if part.begins else {}
        calls = {"tool_calls": [{"index": call.index, **call.format_call()} for call in part.calls]}
        reasoning = {"reasoning_content": part.reasoning} if part.reasoning else {}
        delta = {**role, "content": part.text, **reasoning, **(calls if part.calls else {})}
        return {"index": part.choice, "delta": delta, **self._common_fields(part)}

    def _common_fields(self, part: ChoiceDelta) -> dict[str, Any]:
        """Return the log-probabilities and the finish reason of a part."""
        content = [self._format_scored_token(scored) for _, scored in part.tokens or () if scored]
        return {
            "logprobs": None if part.tokens is None else {"content": content}, "finish_reason": part.finish,
            "stop_reason": part.stop,
        }  # fmt: skip

    def _format_scored_token(self, scored: ScoredToken) -> dict[str, Any]:
        """Return a token with its log-probability and alternatives in the form of the API."""
        top = [self._format_token(token, logprob) for token, logprob in scored.top]
        return {**self._format_token(scored.token, scored.logprob), "top_logprobs": top}

    def _format_token(self, token: int, logprob: float) -> dict[str, Any]:
        """Return one token with its log-probability in the form of the API."""
        text = self.vocabulary[token]
        return {"token": text.chat_spelling, "logprob": clip_logprob(logprob), "bytes": list(text.raw)}


async def stream_answer_parts(
    events: AsyncIterator[tuple[int, GenerationEvent]],
    echoes: Sequence[EchoedPrompt | None],
    scored: bool,
    *,
    echo_only: bool = False,
) -> AsyncIterator[ChoiceDelta]:
    """Convert events of the inference engine to new content of an answer's choices, as it is generated.
    The content is yielded; each choice begins with its echoed prompt, if any.

    Args:
        events: events of the engine with the index of the choice.
        echoes: for each choice, the prompt to repeat at the start of the answer, or None.
        scored: include log-probabilities.
        echo_only: leave out the generated tokens.
    """
    started: set[int] = set()
    async for choice, event in events:
        if echo_only:
            event = replace(event, text="", tokens=[], scored=[], finish="length" if event.finish else None)
        first = choice not in started
        started.add(choice)
        echo = echoes[choice] if first else None
        text = echo.text + event.text if echo else event.text
        tokens: list[TokenEvent] = [(token.token, token) for token in event.scored]
        if echo and scored:
            tokens = [*zip(echo.tokens, event.prompt or (), strict=True), *tokens]
        yield ChoiceDelta(
            choice, text, tokens if scored else None, len(event.tokens), FINISH.get(event.finish), first, event.stop
        )


@dataclass
class CompletionAnswerBuilder:
    """Builder of one JSON answer of /v1/completions or /v1/chat/completions.

    Attributes:
        form: format of completions or of chat.
        model: name of the served model.
        usage: token counts so far.
    """

    form: AnswerFormat
    model: str
    usage: TokenUsage

    def __post_init__(self) -> None:
        self._id, self._created = f"{self.form.prefix}{uuid.uuid4().hex}", int(time.time())

    def _format_body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return the JSON body of an answer or of a chunk."""
        head = {"id": self._id, "object": kind, "created": self._created, "model": self.model}
        return {**head, "choices": choices, **more}

    async def build_answer(self, parts: AsyncIterator[ChoiceDelta]) -> dict[str, Any]:
        """Collect all generated content and return a complete OpenAI completion or chat completion."""
        choices: dict[int, ChoiceDelta] = {}
        async for part in parts:
            self.usage.completion += part.count
            if part.begins:
                choices[part.choice] = part
            else:
                choices[part.choice].append_delta(part)
        ready = [self.form.format_choice(choices[number]) for number in sorted(choices)]
        return self._format_body(self.form.whole, ready, usage=self.usage.format_usage())

    async def stream_chunks(self, parts: AsyncIterator[ChoiceDelta], options: StreamOptions) -> AsyncIterator[bytes]:
        """Yield an OpenAI completion or chat completion as server-sent events of JSON chunks, ended by `[DONE]`."""
        async for part in parts:
            self.usage.completion += part.count
            if part.begins or part.text or part.reasoning or part.calls or part.tokens or part.finish:
                usage = {"usage": self.usage.format_usage()} if options.continuous_usage_stats else {}
                yield format_sse_event(self._format_body(self.form.chunk, [self.form.format_delta(part)], **usage))
        if options.include_usage:
            yield format_sse_event(self._format_body(self.form.chunk, [], usage=self.usage.format_usage()))
        yield b"data: [DONE]\n\n"

    def format_stream_error(self, error: ApiRequestError) -> bytes:
        """Return the server-sent event of an error in a stream of OpenAI completions, as bytes."""
        return format_sse_event(error.format_error_body())


def clip_logprob(logprob: float) -> float:
    """Return the log-probability, raised to -9999 if it is lower, for JSON answers.
    JSON has no infinity, and OpenAI's clients expect this number.
    """
    return max(logprob, -9999.0)


def format_sse_event(body: dict[str, Any], kind: str | None = None) -> bytes:
    """Return the bytes of a server-sent event whose data is the JSON object `body`; `kind` is its field `event`."""
    head = "" if kind is None else f"event: {kind}\n"
    return f"{head}data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()
