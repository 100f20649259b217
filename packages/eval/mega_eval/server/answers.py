"""From what the engine says to the JSON of OpenAI's API, whole or as a stream of chunks.

Both are made from the same parts, so that the chunks of a stream put together are the whole answer.
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

from mega_eval.engine import Event, Scored
from mega_eval.server.schemas import StreamOptions
from mega_eval.server.vocabulary import TokenText, Vocabulary

Told = tuple[int, Scored | None]  # a token and what is known of it: nothing of the first of a prompt

FinishReason = Literal["stop", "length", "tool_calls"]
FINISH: dict[str | None, FinishReason] = {"end": "stop", "stop": "stop", "length": "length"}


class Echo(NamedTuple):
    """A prompt that its answer begins with."""

    text: str
    tokens: Sequence[int]


@dataclass
class Part:
    """What one choice says more.

    Attributes:
        choice: its number in the answer.
        text: in addition.
        tokens: each new token with what is told about it, where that was asked for.
        count: new tokens.
        finish: what ended it, as the API calls it.
        begins: whether it is the first of its choice.
        calls: of functions, in the form of the API.
    """

    choice: int
    text: str
    tokens: list[Told] | None
    count: int
    finish: FinishReason | None
    begins: bool
    calls: list[dict[str, Any]] = field(default_factory=list)

    def join(self, more: Part) -> None:
        """Append what followed."""
        self.text += more.text
        self.count += more.count
        self.finish = more.finish
        if self.tokens is not None:
            self.tokens += more.tokens or []


@dataclass
class Usage:
    """Tokens of an answer so far."""

    prompt: int
    completion: int = 0

    def body(self) -> dict[str, int]:
        """The JSON of it."""
        total = self.prompt + self.completion
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion, "total_tokens": total}


class Format(Protocol):
    """One of the two forms of answers."""

    prefix: str
    whole: str
    chunk: str

    def choice(self, part: Part) -> dict[str, Any]:
        """A choice of a whole answer."""

    def delta(self, part: Part) -> dict[str, Any]:
        """A choice of a chunk."""


class TextOffsets:
    """Number of characters of one choice's text before each of its tokens.

    A token inside of a character has the offset of that character. Special tokens count where the text has them.
    """

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, tokens: Sequence[TokenText], text: str) -> list[int]:
        """Return the offsets of the next tokens; `text` is the next part of the text."""
        self._text += text
        found = []
        for token in tokens:
            found.append(self._at)
            self._at += len(self._shown(token))
        return found

    def _shown(self, token: TokenText) -> str:
        if token.special:
            return token.text if token.text and self._text.startswith(token.text, self._at) else ""
        piece = self._decoder.decode(token.raw)
        if self._at == 0 and not self._text.startswith(piece):
            return piece.lstrip(" ")  # SentencePiece drops the space that begins a text
        return piece


@dataclass
class Completions:
    """The form of /v1/completions."""

    vocabulary: Vocabulary
    prefix = "cmpl-"
    whole = chunk = "text_completion"
    _offsets: defaultdict[int, TextOffsets] = field(default_factory=lambda: defaultdict(TextOffsets))

    def choice(self, part: Part) -> dict[str, Any]:
        """A choice, the same in a chunk."""
        logprobs = None if part.tokens is None else self._logprobs(part, part.tokens)
        return {"index": part.choice, "text": part.text, "logprobs": logprobs, "finish_reason": part.finish}

    delta = choice

    def _logprobs(self, part: Part, tokens: Sequence[Told]) -> dict[str, Any]:
        texts = [self.vocabulary[token] for token, _ in tokens]
        return {
            "tokens": [text.in_completion for text in texts],
            "token_logprobs": [scored and finite(scored.logprob) for _, scored in tokens],
            "top_logprobs": [scored and self._top(scored) for _, scored in tokens],
            "text_offset": self._offsets[part.choice].next(texts, part.text),
        }

    def _top(self, scored: Scored) -> dict[str, float]:
        """The likeliest, and the token itself; of tokens that look alike the likeliest."""
        found: dict[str, float] = {}
        for token, logprob in [*scored.top, (scored.token, scored.logprob)]:
            found.setdefault(self.vocabulary[token].in_completion, finite(logprob))
        return found


@dataclass
class Chat:
    """The form of /v1/chat/completions."""

    vocabulary: Vocabulary
    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, part: Part) -> dict[str, Any]:
        """A choice of a whole answer."""
        calls = {"tool_calls": part.calls} if part.calls else {}
        message = {"role": "assistant", "content": part.text or (None if calls else ""), **calls}
        return {"index": part.choice, "message": message, **self._rest(part)}

    def delta(self, part: Part) -> dict[str, Any]:
        """A choice of a chunk; the first names the role."""
        role = {"role": "assistant"} if part.begins else {}
        calls = {"tool_calls": [{"index": at, **call} for at, call in enumerate(part.calls)]} if part.calls else {}
        return {"index": part.choice, "delta": {**role, "content": part.text, **calls}, **self._rest(part)}

    def _rest(self, part: Part) -> dict[str, Any]:
        told = [self._told(scored) for _, scored in part.tokens or () if scored]
        return {"logprobs": None if part.tokens is None else {"content": told}, "finish_reason": part.finish}

    def _told(self, scored: Scored) -> dict[str, Any]:
        top = [self._one(token, logprob) for token, logprob in scored.top]
        return {**self._one(scored.token, scored.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.vocabulary[token]
        return {"token": text.in_chat, "logprob": finite(logprob), "bytes": list(text.raw)}


async def parts(
    said: AsyncIterator[tuple[int, Event]], echoes: Sequence[Echo | None], scored: bool, *, echo_only: bool = False
) -> AsyncIterator[Part]:
    """What each choice says more, as it comes.

    Args:
        said: by the engine, with the number of the choice.
        echoes: for each choice, the prompt that comes first in the answer, if it is to.
        scored: whether log-probabilities are told.
        echo_only: leave the generated tokens out.
    """
    begun: set[int] = set()
    async for choice, event in said:
        if echo_only:
            event = replace(event, text="", tokens=[], scored=[], finish="length" if event.finish else None)
        first = choice not in begun
        begun.add(choice)
        echo = echoes[choice] if first else None
        text = echo.text + event.text if echo else event.text
        told: list[Told] = [(one.token, one) for one in event.scored]
        if echo and scored:
            told = [*zip(echo.tokens, event.prompt or (), strict=True), *told]
        yield Part(choice, text, told if scored else None, len(event.tokens), FINISH.get(event.finish), first)


@dataclass
class Answer:
    """One answer in the making.

    Attributes:
        form: of completions or of chat.
        model: as it is served.
        usage: tokens so far.
    """

    form: Format
    model: str
    usage: Usage

    def __post_init__(self) -> None:
        self._id, self._created = f"{self.form.prefix}{uuid.uuid4().hex}", int(time.time())

    def _body(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self.model}
        return {**head, "choices": choices, **more}

    async def whole(self, told: AsyncIterator[Part]) -> dict[str, Any]:
        """The answer in one piece."""
        choices: dict[int, Part] = {}
        async for part in told:
            self.usage.completion += part.count
            if part.begins:
                choices[part.choice] = part
            else:
                choices[part.choice].join(part)
        ready = [self.form.choice(choices[number]) for number in sorted(choices)]
        return self._body(self.form.whole, ready, usage=self.usage.body())

    async def chunks(self, told: AsyncIterator[Part], options: StreamOptions) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        async for part in told:
            self.usage.completion += part.count
            if part.begins or part.text or part.tokens or part.finish:
                usage = {"usage": self.usage.body()} if options.continuous_usage_stats else {}
                yield event(self._body(self.form.chunk, [self.form.delta(part)], **usage))
        if options.include_usage:
            yield event(self._body(self.form.chunk, [], usage=self.usage.body()))
        yield b"data: [DONE]\n\n"


def finite(logprob: float) -> float:
    """JSON has no infinity; the clients know this number for it."""
    return max(logprob, -9999.0)


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
