"""Documents of any length, as returned by the readers, and rejected items.

Texts too long for memory are stored in an unnamed file and encoded piece by piece. A JSON string of any length is stored
without being in memory as a whole: `extract_long_strings` reads JSON text in blocks, stores the long strings, and yields the
rest, with a short name for each, for the `json` module to parse.
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
from typing import IO, Any, NamedTuple, Self

from mega_common.bounded_parsing import describe_json_type, explain_read_error
from mega_common.errors import DataError
from mega_data.reading.corpus_sources import ABSENT, lookup_record_value
from mega_data.reading.decompression import DecompressionMemoryError
from mega_data.token_files.partial_folder import convert_write_errors_to_data_error

LONG = 1 << 22  # bytes of a text or line; longer ones are not kept in memory
BLOCK = 1 << 20  # bytes of a block in memory
_TEXT_KEY_HINT = "--json-key KEY selects the key that has the text; for chats, add --kind conversations"

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


class DiskBackedText:
    """Text too long for memory, in an unnamed temporary file that disappears with the process.

    Attributes:
        size: number of UTF-8 bytes.
        lone_surrogate: position of the first lone surrogate, which JSON can encode, or None.

    Raises:
        DataError: if the disk is full or fails, also from the append methods and `read_blocks`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with convert_write_errors_to_data_error(folder):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in __exit__, after encoding
        self.size = self._characters = 0
        self.lone_surrogate: int | None = None

    @classmethod
    def from_blocks(cls, blocks: Iterable[str], folder: Path) -> DiskBackedText:
        """Store consecutive blocks of a text as a long text in a temporary file in `folder`."""
        text = cls(folder)
        for block in blocks:
            text.append_text(block)
        return text

    def append_text(self, text: str) -> None:
        """Append `text` to a long text that is stored in a temporary file."""
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            if self.lone_surrogate is None:
                self.lone_surrogate = self._characters + error.start
            raw = text.encode("utf-8", "replace")
        with convert_write_errors_to_data_error(self._folder):
            self._file.write(raw)
        self.size += len(raw)
        self._characters += len(text)

    def append_json_string(self, text: str, blocks: Iterator[str]) -> str:
        """Append the value of a JSON string, which may continue in later `blocks`; return the JSON text after the string.
        `text` begins after the opening quotation mark.

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
        """Yield a long text in a temporary file from its beginning, in blocks."""
        with convert_write_errors_to_data_error(self._folder):
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


def extract_long_strings(blocks: Iterator[str], folder: Path, strings: dict[str, DiskBackedText]) -> Iterator[str]:
    """Yield JSON text, in blocks, with each long string moved to `strings` as a `DiskBackedText`.
    The string is replaced in the JSON by its key in that dictionary.

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
            strings[name] = DiskBackedText(folder)
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


MAX_RECORD_BYTES = 1 << 26  # of a JSON record, without the long strings that are stored on disk
SHOWN = 1 << 16  # bytes of a long bad line that are shown
MAX_TEXT_BYTES = 1 << 28  # of a text in CSV or Parquet


class LossSpan(NamedTuple):
    """Characters [begin, end) of a conversation's text that count in the loss, and their weight in the loss."""

    begin: int
    end: int
    weight: float


class RenderedChat(NamedTuple):
    """Text of a conversation by the chat template, with the spans that count in the loss.
    Notes about parts that the template left out are included.
    """

    text: str
    spans: tuple[LossSpan, ...]
    notes: tuple[str, ...] = ()


class Document(NamedTuple):
    """Text of a corpus document, `size` bytes in UTF-8, with its source position.

    Attributes:
        line: number of the line, row, record or JSON value, from 1.
        chats: conversations of a record; `text` is then empty.
        record: the whole record, if requested and supported by the format.
        long: text too long for memory; `text` is then empty.
        notes: notes to report.
    """

    text: str
    size: int
    file: str
    line: int
    chats: tuple[RenderedChat, ...] = ()
    record: dict[str, Any] | None = None
    long: DiskBackedText | None = None
    notes: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """Source position as `file:line`, in the form that editors accept."""
        return f"{self.file}:{self.line}"


class RejectedItem(NamedTuple):
    """Position in a source where no usable document was found, with the reason and the content found there.

    `skipped` marks a file of a folder that does not belong to the corpus, such as an image, and is not an error. `hint` is
    the fix, if the whole input rather than this record needs one.
    """

    reason: str
    content: str
    file: str
    line: int
    skipped: bool = False
    hint: str = ""


DocumentStream = Iterator[Document | RejectedItem]


def explain_too_large(limit: int) -> str:
    """Return the reason why a record or text is rejected as larger than `limit` bytes, as text for a user."""
    return f"larger than {limit >> 20} MiB, the limit for one record"


def document_from_text(value: object, key: str, file: str, line: int) -> Document | RejectedItem:
    """Return the document with the text `value`, found under `key` of a record, or a rejected item.
    The text is rejected if it is not a string, is too large or has lone surrogates, which JSON can encode.
    """
    if isinstance(value, DiskBackedText):
        return _document_from_long_text(value, key, file, line)
    if not isinstance(value, str):
        return RejectedItem(f"{key!r} is {describe_json_type(value)}, not a string", repr(value), file, line)
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        shown = value.encode("utf-8", "backslashreplace").decode()
        return RejectedItem(
            f"{key!r} is not valid Unicode (lone surrogate at character {error.start})", shown, file, line
        )
    if size > MAX_TEXT_BYTES:
        return RejectedItem(explain_too_large(MAX_TEXT_BYTES), value[:SHOWN], file, line)
    return Document(value, size, file, line)


def _document_from_long_text(text: DiskBackedText, key: str, file: str, line: int) -> Document | RejectedItem:
    if text.lone_surrogate is None:
        return Document("", text.size, file, line, long=text)
    with text:
        reason = f"{key!r} is not valid Unicode (lone surrogate at character {text.lone_surrogate})"
        return RejectedItem(reason, next(text.read_blocks()), file, line)


def reject_damaged_rest(error: Exception, file: str, line: int) -> RejectedItem:
    """Return the rejected item for the unread rest of a damaged file, from line `line` on."""
    reason = f"cannot be read to its end ({explain_read_error(error)}); the file is damaged or truncated"
    if isinstance(error, DecompressionMemoryError):
        reason = str(error)
    return RejectedItem(reason, "", file, line)


def no_column_error(name: str, key: str, columns: str) -> DataError:
    """Return the error for a table `name` without the column of the text; `columns` are those that it has."""
    return DataError(
        f"{name}: no column {key!r}; the columns are {columns}",
        hint=_TEXT_KEY_HINT,
    )


def document_from_record(
    record: object, key: str, file: str, line: int, whole: bool, strings: dict[str, DiskBackedText]
) -> Document | RejectedItem:
    """Return the document of a record's text under `key`, or a rejected item if it is no object or has no text there.
    With `whole` the record is attached to the document. `strings` maps placeholder names in the record to long strings.
    """
    if not isinstance(record, dict):
        return RejectedItem(f"the record is {describe_json_type(record)}, not an object", "", file, line)
    value = lookup_record_value(record, key)
    if strings:
        value = strings.pop(value, value) if isinstance(value, str) else value
        _close_unused(strings, json.dumps(record))
    if value is ABSENT:
        return RejectedItem(
            f"no key {key!r}; the keys are {format_key_names(record)}",
            "",
            file,
            line,
            hint=_TEXT_KEY_HINT,
        )
    return attach_record(document_from_text(value, key, file, line), record if whole else None)


def _close_unused(strings: dict[str, DiskBackedText], record: str) -> None:
    """Close the long strings named in a record that are not the text."""
    for name in [name for name in strings if name in record]:
        with strings.pop(name):
            pass


def attach_record(item: Document | RejectedItem, record: dict[str, Any] | None) -> Document | RejectedItem:
    """Return a document with `record` attached, if that is not None; rejected items are returned unchanged."""
    return item._replace(record=record) if record is not None and isinstance(item, Document) else item


def format_key_names(record: dict[str, Any]) -> str:
    """Return the keys of a record as comma-separated text, with keys of nested objects as `a.b`."""
    names = (
        [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key] for key, value in record.items()
    )
    return ", ".join(name for group in names for name in group) or "none"


def escape_invalid_utf8(raw: bytes) -> str:
    """Return a raw line as text, with invalid UTF-8 bytes escaped as hexadecimal."""
    return raw.decode("utf-8", "backslashreplace").rstrip("\n")
