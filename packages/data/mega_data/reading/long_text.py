"""Texts too long for memory, stored in an unnamed file and encoded piece by piece.

A JSON string of any length gets there without ever being whole in memory: `shorten` goes over JSON text in blocks, takes
the long strings out, and lets through what remains, with a short name for each of them, for the `json` module to parse.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from mega_data.preprocessing.partial_folder import translate_write_errors

LONG = 1 << 22  # bytes of a text, or line, from which on it is not held
BLOCK = 1 << 20  # of them that are

# What of JSON text ends outside a string: anything else than strings, and whole ones.
OUTSIDE = re.compile(r'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)

# What of a string's inside can be unescaped by itself: no half of an escape, and no half of a pair of surrogates.
INSIDE = re.compile(
    r"""(?: [^"\\]++ | \\[^u]
      | \\u (?![dD][89abAB]) [0-9a-fA-F]{4}
      | \\u [dD][89abAB][0-9a-fA-F]{2} (?: \\u[dD][c-fC-F][0-9a-fA-F]{2} | (?=[^\\]) | (?=\\.{5}) ) )*+""",
    re.DOTALL | re.VERBOSE,
)
LONGEST_ESCAPE = 12  # characters: a pair of surrogates


class LongText:
    """Text in an unnamed temporary file, which disappears with the process.

    Attributes:
        size: its UTF-8 bytes.
        lone_surrogate: the number of the first character that is none but half a pair, as JSON can spell it.

    Raises:
        DataError: when the disk refuses, also from what adds to it and from `read_blocks`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with translate_write_errors(folder):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by whoever encoded it
        self.size = self._characters = 0
        self.lone_surrogate: int | None = None

    @classmethod
    def from_blocks(cls, blocks: Iterable[str], folder: Path) -> LongText:
        """Store blocks of text as a long text."""
        text = cls(folder)
        for block in blocks:
            text.append_text(block)
        return text

    def append_text(self, text: str) -> None:
        """Append text."""
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            if self.lone_surrogate is None:
                self.lone_surrogate = self._characters + error.start
            raw = text.encode("utf-8", "replace")
        with translate_write_errors(self._folder):
            self._file.write(raw)
        self.size += len(raw)
        self._characters += len(text)

    def append_json_string(self, text: str, blocks: Iterator[str]) -> str:
        """Append a JSON string that begins with `text` (after the quotation mark) and continues in `blocks`; return the
        text behind its end.

        Raises:
            ValueError: when it is none.
        """
        while True:
            end = INSIDE.match(text).end()  # type: ignore[union-attr]  # it matches nothing as well
            self.append_text(json.loads(f'"{text[:end]}"'))
            text = text[end:]
            if text.startswith('"'):
                return text[1:]
            more = next(blocks, "")
            if not more or len(text) >= LONGEST_ESCAPE:
                raise ValueError("Invalid \\escape" if more else "Unterminated string")
            text += more

    def read_blocks(self) -> Iterator[str]:
        """Yield the text from its beginning, in blocks."""
        with translate_write_errors(self._folder):
            self._file.seek(0)  # which writes what is not written yet
        return decode_blocks(iterate_blocks(self._file))

    def __contains__(self, word: str) -> bool:
        seen = ""
        for block in self.read_blocks():
            seen = seen[-len(word) :] + block
            if word in seen:
                return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def extract_long_strings(blocks: Iterator[str], folder: Path, strings: dict[str, LongText]) -> Iterator[str]:
    """Yield JSON text, in blocks, with each long string moved to `strings` and replaced by its name there.

    Raises:
        ValueError: at a long string that is none.
    """
    rest = ""
    for block in blocks:
        rest += block
        end = OUTSIDE.match(rest).end()  # type: ignore[union-attr]  # it matches nothing as well
        yield rest[:end]
        rest = rest[end:]
        if len(rest) >= LONG:
            name = secrets.token_hex(16)  # which nothing else in the text is
            strings[name] = LongText(folder)
            rest = strings[name].append_json_string(rest[1:], blocks)
            yield f'"{name}"'
    yield rest


def decode_blocks(blocks: Iterable[bytes]) -> Iterator[str]:
    """Yield the text of blocks of UTF-8.

    Raises:
        UnicodeDecodeError: when they are not; its `start` counts from the first block on.
    """
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    for block in chain(blocks, [b""]):
        held = len(decoder.getstate()[0])
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            error.start += read - held
            raise
        read += len(block)


def iterate_blocks(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the rest of a stream in blocks."""
    return iter(lambda: stream.read(BLOCK), b"")
