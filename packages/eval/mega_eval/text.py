"""Tokens to text as they come: whole characters, stop strings that never show, what ends a continuation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mega_common.errors import ConfigError

CONTEXT = 16  # tokens that are decoded again with new ones, for decoders to which a token's neighbours matter
WINDOW = 64  # tokens to decode at most, but for the rest of a character

Finish = Literal["end", "stop", "length"]


class Text(Protocol):
    """What generation needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokens of a text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of tokens."""


@dataclass(frozen=True)
class Limits:
    """When a continuation ends.

    Attributes:
        max_new_tokens: at the latest after so many.
        stop: at the first of these strings, which is left out.
        ends: at any of these tokens, which is left out of the text.
        stop_tokens: tokens that end it like a stop string, and are left out of the text.
        min_new_tokens: neither a stop string nor a token ends it before so many tokens.
        include_stop: keep the stop string, or the text of the stop token.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_new_tokens: int = 256
    stop: Sequence[str] = ()
    ends: Collection[int] = ()
    stop_tokens: Collection[int] = ()
    min_new_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens = {self.max_new_tokens}: must be at least 1")
        if "" in self.stop:
            raise ConfigError("a stop string is empty, which every text contains")


class TextStream:
    """Turns tokens into text as they come. Characters appear when their last byte has; `decode` is the tokenizer's."""

    def __init__(self, tokenizer: Text, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens = list(prompt[-CONTEXT:])
        self._told = len(self._decode())

    def add(self, token: int) -> str:
        """The text that is complete with this token and was not before."""
        self._tokens.append(token)
        text = self._decode()
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new, self._told = whole[self._told :], max(self._told, len(whole))
        if len(self._tokens) > WINDOW and whole == text:
            self._tokens = self._tokens[-CONTEXT:]
            self._told = len(self._decode())
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip)


@dataclass
class Continuation:
    """What has followed a prompt so far: tokens, the text of them that is certain, and what ended it."""

    tokenizer: Text
    limits: Limits
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer, self.prompt, skip_special_tokens=self.limits.skip_special_tokens)
        self._held = ""  # the end of the text so far that may be the begin of a stop string

    def add(self, token: int) -> str:
        """Take the next token; returns the text that is certain now."""
        self.tokens.append(token)
        stops = token in self.limits.stop_tokens and len(self.tokens) > self.limits.min_new_tokens
        if token in self.limits.ends:
            self.finish = "end"
        elif not stops or self.limits.include_stop:
            self._held += self._stream.add(token)
            if len(self.tokens) == self.limits.max_new_tokens:
                self.finish = "length"
        if stops and self.finish != "end":
            self.finish = "stop"
        new = self._release()
        self.text += new
        return new

    @property
    def room(self) -> int:
        """Tokens that it may have yet."""
        return self.limits.max_new_tokens - len(self.tokens)

    def end(self) -> str:
        """Nothing more is to come; returns the text that was held back."""
        if self.finish is not None:
            return ""
        self.finish = "end"
        new = self._release()
        self.text += new
        return new

    def _release(self) -> str:
        early = len(self.tokens) <= self.limits.min_new_tokens
        found = [] if early else [(at, stop) for stop in self.limits.stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.finish = "stop"
            at, stop = min(found)
            return self._held[: at + len(stop) * self.limits.include_stop]
        held = 0 if self.finish else max((_overlap(self._held, stop) for stop in self.limits.stop), default=0)
        at = len(self._held) - held
        new, self._held = self._held[:at], self._held[at:]
        return new


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
