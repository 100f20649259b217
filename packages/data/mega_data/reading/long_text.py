"""Texts too long for memory, stored in an unnamed file and encoded piece by piece.

A JSON string of any length is stored without being in memory as a whole: `extract_long_strings` reads JSON text in
blocks, stores the long strings, and yields the rest, with a short name for each, for the `json` module to parse.
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

from mega_data.token_files.partial_folder import translate_write_errors

LONG = 1 << 22  # bytes of a text or line; longer ones are not kept in memory
BLOCK = 1 << 20  # bytes of a block in memory

# JSON text that ends outside a string: complete strings, and anything else.
OUTSIDE = re.compile(r'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)

# Part of a JSON string that can be unescaped separately: without a partial escape or a partial surrogate pair.
INSIDE = re.compile(
    r"""(?: [^"\\]++ | \\[^u]
      | \\u (?![dD][89abAB]) [0-9a-fA-F]{4}
      | \\u [dD][89abAB][0-9a-fA-F]{2} (?: \\u[dD][c-fC-F][0-9a-fA-F]{2} | (?=[^\\]) | (?=\\.{5}) ) )*+""",
    re.DOTALL | re.VERBOSE,
)
LONGEST_ESCAPE = 12  # characters: a pair of surrogates


class LongText:
    """Text too long for memory, in an unnamed temporary file that disappears with the process.

    Attributes:
        size: number of UTF-8 bytes.
        lone_surrogate: position of the first lone surrogate, which JSON can encode, or None.

    Raises:
        DataError: if the disk is full or fails, also from the append methods and `read_blocks`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with translate_write_errors(folder):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in __exit__, after encoding
        self.size = self._characters = 0
        self.lone_surrogate: int | None = None

    @classmethod
    def from_blocks(cls, blocks: Iterable[str], folder: Path) -> LongText:
        """Store consecutive blocks of a text as a long text in a temporary file in `folder`."""
        text = cls(folder)
        for block in blocks:
            text.append_text(block)
        return text

    def append_text(self, text: str) -> None:
        """Append `text` to the stored text."""
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
        """Append the value of a JSON string that begins with `text` (after the quotation mark) and continues in
        `blocks`.

        Returns:
            The text after the end of the string.

        Raises:
            ValueError: if it is not a valid JSON string.
        """
        while True:
            end = INSIDE.match(text).end()  # type: ignore[union-attr]  # it matches an empty string as well
            self.append_text(json.loads(f'"{text[:end]}"'))
            text = text[end:]
            if text.startswith('"'):
                return text[1:]
            more = next(blocks, "")
            if not more or len(text) >= LONGEST_ESCAPE:
                raise ValueError("Invalid \\escape" if more else "Unterminated string")
            text += more

    def read_blocks(self) -> Iterator[str]:
        """Yield the stored text from its beginning, in blocks."""
        with translate_write_errors(self._folder):
            self._file.seek(0)  # also flushes
        return decode_blocks(iterate_blocks(self._file))

    def __contains__(self, word: str) -> bool:
        window = ""
        for block in self.read_blocks():
            window = window[-len(word) :] + block
            if word in window:
                return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def extract_long_strings(blocks: Iterator[str], folder: Path, strings: dict[str, LongText]) -> Iterator[str]:
    """Yield JSON text, in blocks, with each long string moved to `strings` as a `LongText` and replaced in the JSON by
    its key in that dictionary.

    Raises:
        ValueError: at an invalid long string.
    """
    rest = ""
    for block in blocks:
        rest += block
        end = OUTSIDE.match(rest).end()  # type: ignore[union-attr]  # it matches an empty string as well
        yield rest[:end]
        rest = rest[end:]
        if len(rest) >= LONG:
            name = secrets.token_hex(16)  # occurs nowhere else in the text
            strings[name] = LongText(folder)
            rest = strings[name].append_json_string(rest[1:], blocks)
            yield f'"{name}"'
    yield rest


def decode_blocks(blocks: Iterable[bytes]) -> Iterator[str]:
    """Yield the text of consecutive blocks of UTF-8 bytes; characters may be split between blocks.

    Raises:
        UnicodeDecodeError: if they are not UTF-8; its `start` counts from the first block.
    """
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    for block in chain(blocks, [b""]):
        buffered = len(decoder.getstate()[0])
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            error.start += read - buffered
            raise
        read += len(block)


def iterate_blocks(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the rest of a stream in blocks of bytes."""
    return iter(lambda: stream.read(BLOCK), b"")
