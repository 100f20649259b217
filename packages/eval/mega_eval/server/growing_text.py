"""Text of an answer that arrives in pieces, with generator functions that read it as far as it is final.

A generator yields `ParsedAnswerDelta`s, and None when it needs more text. Its work is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Literal, NamedTuple

from mega_eval.text_stream import measure_partial_stop_match

LONGEST_MATCH = 1000  # characters of a text that patterns are matched with, each time it grows

DeltaKind = Literal["content", "reasoning", "call", "arguments"]


class ParsedAnswerDelta(NamedTuple):
    """New piece of a parsed answer: text of content or reasoning, the name of a called function, or its JSON arguments.
    `call_id` is the id that the model gave the call, if any.
    """

    kind: DeltaKind
    text: str
    call_id: str | None = None


Deltas = Generator[ParsedAnswerDelta | None, None, None]
Waits = Generator[None, None, bool]


class JsonScanner:
    """Incremental search for the end of a JSON object or list: brackets are counted outside of strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def find_json_end(self, text: str, begin: int = 0) -> int | None:
        """Return the index after the bracket that closes the first one; None if it is not in the text.
        Only `text[begin:]`, which continues the text of the last call, is searched.
        """
        for at in range(begin, len(text)):
            letter = text[at]
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


class StreamingTextReader:
    """Reader of a text that arrives in pieces; its generators yield None while they wait for more text.

    Attributes:
        unread: text that has arrived and was not read.
        ended: True once no more text arrives.
    """

    def __init__(self) -> None:
        self.unread = ""
        self.ended = False

    def read(self, count: int) -> str:
        """Return the next `count` characters, and remove them from the unread text."""
        text, self.unread = self.unread[:count], self.unread[count:]
        return text

    def peek_past_whitespace(self) -> Generator[None, None, str]:
        """Wait for a character that is not white space; return the unread text from there, and leave all of it unread."""
        while not (text := self.unread.lstrip()) and not self.ended:
            yield None
        return text

    def skip_whitespace(self) -> Waits:
        """Drop white space, waiting for the character after it, and return whether there is one."""
        self.unread = yield from self.peek_past_whitespace()
        return bool(self.unread)

    def skip_mark(self, *marks: str) -> Waits:
        """Drop one of `marks` at the start of the unread text, and return whether it was there.
        Waits until the text starts with a mark or cannot do so any more.
        """
        while not self.ended and any(mark.startswith(self.unread) and mark != self.unread for mark in marks):
            yield None
        found = next((mark for mark in marks if self.unread.startswith(mark)), "")
        self.read(len(found))
        return bool(found)

    def stream_until(self, kind: DeltaKind, *marks: str) -> Generator[ParsedAnswerDelta | None, None, str | None]:
        """Yield the text before the first of `marks` as it arrives, drop the mark and return it; None if none comes."""
        while (found := self._find_first(marks)) is None and not self.ended:
            held = max((measure_partial_stop_match(self.unread, mark) for mark in marks), default=0)
            if ready := self.read(len(self.unread) - held):
                yield ParsedAnswerDelta(kind, ready)
            yield None
        if text := self.read(len(self.unread) if found is None else found[0]):
            yield ParsedAnswerDelta(kind, text)
        if found is not None:
            self.read(len(found[1]))
        return None if found is None else found[1]

    def take_until(self, *marks: str) -> Generator[None, None, tuple[str, str | None]]:
        """Wait for the first of `marks`; return the text before it and the mark, or the rest of the text and None."""
        while (found := self._find_first(marks)) is None and not self.ended:
            yield None
        if found is None:
            return self.read(len(self.unread)), None
        text = self.read(found[0])
        return text, self.read(len(found[1]))

    def wait_for_match(self, pattern: re.Pattern[str]) -> Generator[None, None, re.Match[str] | None]:
        """Wait until `pattern` matches at the start of the unread text; return the match, left unread, or None if none comes.
        None is returned after `LONGEST_MATCH` characters or at the end of the text.
        """
        while (found := pattern.match(self.unread)) is None and not self.ended and len(self.unread) < LONGEST_MATCH:
            yield None
        return found

    def take_json(
        self, accept: Callable[[str], re.Match[str] | None] = lambda _: None
    ) -> Generator[None, None, re.Match[str] | str]:
        """Take the JSON object or list at the start of the unread text once it is complete, or return a match of `accept`.
        Returns the rest of the text if it does not end. As soon as `accept` of the unread text is a match, the
        text is left unread.
        """
        scanner, scanned = JsonScanner(), 0
        while True:
            if len(self.unread) < LONGEST_MATCH and (found := accept(self.unread)):
                return found
            end = scanner.find_json_end(self.unread, scanned)
            if end is not None or self.ended:
                return self.read(len(self.unread) if end is None else end)
            scanned = len(self.unread)
            yield None

    def stream_json(self) -> Deltas:
        """Yield the JSON object at the start of the unread text, as it arrives, as deltas of kind `arguments`."""
        scanner = JsonScanner()
        while (end := scanner.find_json_end(self.unread)) is None and not self.ended:
            if self.unread:
                yield ParsedAnswerDelta("arguments", self.read(len(self.unread)))
            yield None
        if text := self.read(len(self.unread) if end is None else end):
            yield ParsedAnswerDelta("arguments", text)

    def _find_first(self, marks: tuple[str, ...]) -> tuple[int, str] | None:
        """Return the position and text of the first of `marks` in the unread text."""
        found = [(at, mark) for mark in marks if (at := self.unread.find(mark)) >= 0]
        return min(found, default=None)
