"""Incremental detokenisation: whole characters, stop strings that are never shown, and limits of a continuation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mega_common.errors import ConfigError

CONTEXT = 16  # tokens that are decoded again with new ones, as the text of a token may depend on those before it
WINDOW = 64  # maximum number of tokens to decode, unless a character is incomplete

FinishCause = Literal["end", "stop", "length"]


class TextTokenizer(Protocol):
    """Interface that generation requires of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""


@dataclass(frozen=True)
class GenerationLimits:
    """Conditions that end a generated text: maximum length, stop strings and end tokens.

    Attributes:
        max_new_tokens: maximum number of new tokens.
        stop: strings that end the text; the stop string is left out.
        ends: tokens that end the text, left out of it.
        stop_tokens: tokens that end the text like a stop string, left out of it.
        min_new_tokens: number of new tokens before which stop strings and stop tokens are ignored.
        include_stop: keep the stop string, or the text of the stop token.
        skip_special_tokens: leave special tokens out of the text.
        hidden_tokens: tokens to leave out of the text, whatever `skip_special_tokens` is.
    """

    max_new_tokens: int = 256
    stop: Sequence[str] = ()
    ends: Collection[int] = ()
    stop_tokens: Collection[int] = ()
    min_new_tokens: int = 0
    include_stop: bool = False
    skip_special_tokens: bool = True
    hidden_tokens: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, but is {self.max_new_tokens}")
        if "" in self.stop:
            raise ConfigError("stop strings must not be empty")


class IncrementalDetokenizer:
    """Incremental detokenizer of generated tokens; a character is returned once all of its bytes are decoded."""

    def __init__(self, tokenizer: TextTokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens = list(prompt[-CONTEXT:])
        self._num_returned = len(self._decode_window())  # characters of the window

    def append_token(self, token: int) -> str:
        """Append a token id and return the text that became complete with it, empty inside a character."""
        self._tokens.append(token)
        text = self._decode_window()
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new, self._num_returned = whole[self._num_returned :], max(self._num_returned, len(whole))
        if len(self._tokens) > WINDOW and whole == text:
            self._tokens = self._tokens[-CONTEXT:]
            self._num_returned = len(self._decode_window())
        return new

    def _decode_window(self) -> str:
        """Return the text of the last tokens."""
        return self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip)


@dataclass
class Continuation:
    """Text generated after a prompt so far.
    It has token ids, final text, and the cause of its end; `stop` is the stop string or stop token that ended it.
    """

    tokenizer: TextTokenizer
    limits: GenerationLimits
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishCause | None = None
    stop: str | int | None = None

    def __post_init__(self) -> None:
        self._stream = IncrementalDetokenizer(
            self.tokenizer, self.prompt, skip_special_tokens=self.limits.skip_special_tokens
        )
        self._held = ""  # end of the text so far that may be the start of a stop string

    def append_token(self, token: int) -> str:
        """Append the next token id and return the text that became final; a possible start of a stop string is kept back."""
        self.tokens.append(token)
        stops = token in self.limits.stop_tokens and len(self.tokens) > self.limits.min_new_tokens
        if token in self.limits.ends:
            self.finish = "end"
        elif not stops or self.limits.include_stop:
            if token not in self.limits.hidden_tokens:
                self._held += self._stream.append_token(token)
            if len(self.tokens) == self.limits.max_new_tokens:
                self.finish = "length"
        if stops and self.finish != "end":
            self.finish, self.stop = "stop", token
        new = self._release_text()
        self.text += new
        return new

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that may still be generated before `max_new_tokens` is reached."""
        return self.limits.max_new_tokens - len(self.tokens)

    def flush_held_back_text(self) -> str:
        """End the text without a stop condition and return the text that was kept back.
        It was kept back because it could begin a stop string; empty if the text has already ended.
        """
        if self.finish is not None:
            return ""
        self.finish = "end"
        new = self._release_text()
        self.text += new
        return new

    def _release_text(self) -> str:
        """Return the held text that cannot become part of a stop string."""
        early = len(self.tokens) <= self.limits.min_new_tokens
        found = [] if early else [(at, stop) for stop in self.limits.stop if (at := self._held.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            self.finish, self.stop = "stop", stop
            return self._held[: at + len(stop) * self.limits.include_stop]
        held = (
            0
            if self.finish
            else max((measure_partial_stop_match(self._held, stop) for stop in self.limits.stop), default=0)
        )
        at = len(self._held) - held
        new, self._held = self._held[:at], self._held[at:]
        return new


def measure_partial_stop_match(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
