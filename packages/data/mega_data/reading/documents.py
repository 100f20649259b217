"""Documents and rejected items, as returned by the readers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from mega_common.bounded_parsing import explain_read_error
from mega_data.reading.corpus_sources import ABSENT, lookup_record_value
from mega_data.reading.decompression import DecompressionMemoryError
from mega_data.reading.long_text import LongText

MAX_RECORD_BYTES = 1 << 26  # of a JSON record, without the long strings that are stored on disk
SHOWN = 1 << 16  # bytes of a long bad line that are shown
MAX_TEXT_BYTES = 1 << 28  # of a text in CSV or Parquet


class AnswerSpan(NamedTuple):
    """Characters [begin, end) of a conversation's text that count in the loss, and their weight in the loss."""

    begin: int
    end: int
    weight: float


class RenderedChat(NamedTuple):
    """Text of a conversation by the chat template, the spans that count in the loss, and notes about parts that the
    template left out.
    """

    text: str
    spans: tuple[AnswerSpan, ...]
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
    long: LongText | None = None
    notes: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        """Source position as `file:line`, in the form that editors accept."""
        return f"{self.file}:{self.line}"


class RejectedItem(NamedTuple):
    """Source position without a usable document, with the reason for rejection and the content found there.

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
    """Return the document of a record's text `value`, or a rejected item if it is not a string, is too large or has
    lone surrogates, which JSON can encode.
    """
    if isinstance(value, LongText):
        return _document_from_long_text(value, key, file, line)
    if not isinstance(value, str):
        return RejectedItem(f"{key!r} is {_describe_type(value)}, not a string", repr(value), file, line)
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


def _document_from_long_text(text: LongText, key: str, file: str, line: int) -> Document | RejectedItem:
    if text.lone_surrogate is None:
        return Document("", text.size, file, line, long=text)
    with text:
        reason = f"{key!r} is not valid Unicode (lone surrogate at character {text.lone_surrogate})"
        return RejectedItem(reason, next(text.read_blocks()), file, line)


def _describe_type(value: object) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", int: "a number"}
    return names.get(type(value), f"of type {type(value).__name__}")


def reject_damaged_rest(error: Exception, file: str, line: int) -> RejectedItem:
    """Return the rejected item for the unread rest of a damaged file, from line `line` on."""
    reason = f"cannot be read to its end ({explain_read_error(error)}); the file is damaged or truncated"
    if isinstance(error, DecompressionMemoryError):
        reason = str(error)
    return RejectedItem(reason, "", file, line)


def document_from_record(
    record: object, key: str, file: str, line: int, whole: bool, strings: dict[str, LongText]
) -> Document | RejectedItem:
    """Return the document of a record's text under `key`, or a rejected item; `strings` maps placeholder names in the
    record to long strings.
    """
    if not isinstance(record, dict):
        return RejectedItem(f"the record is {_describe_type(record)}, not an object", "", file, line)
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
            hint="--json-key KEY selects the key that has the text; for chats, add --kind conversations",
        )
    return attach_record(document_from_text(value, key, file, line), record if whole else None)


def _close_unused(strings: dict[str, LongText], record: str) -> None:
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


def escape_bytes(raw: bytes) -> str:
    """Return a raw line as text, with invalid UTF-8 bytes escaped as hexadecimal."""
    return raw.decode("utf-8", "backslashreplace").rstrip("\n")
