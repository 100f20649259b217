"""What reading gives: documents, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from mega_data.chat.template import Rendered
from mega_data.reading.long_text import LongText
from mega_data.reading.sources import ABSENT, lookup


class Document(NamedTuple):
    """A text of `size` UTF-8 bytes, and where it stands (`line` counts from 1; rows, records and JSON values too).

    `record` is all that stands there beside the text, where `read` was asked for it and the format has more.
    `notes` are what is to be reported of it. `chats` are the conversations that a record was, `long` is a text too long to be held; there is no other text then.
    """

    text: str
    size: int
    file: str
    line: int
    chats: tuple[Rendered, ...] = ()
    record: dict[str, Any] | None = None
    long: LongText | None = None
    notes: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """`file:line`, as editors take it."""
        return f"{self.file}:{self.line}"


class Rejected(NamedTuple):
    """A place without a usable document, why, and what stands there.

    `left_out`: a file of a folder that belongs to no corpus (an image, say), which nobody has to mend.
    """

    reason: str
    content: str
    file: str
    line: int
    left_out: bool = False


Items = Iterator[Document | Rejected]


def checked(value: object, key: str, file: str, line: int) -> Document | Rejected:
    """The document of a value that should be text; lone surrogates, which JSON can spell, are none."""
    if isinstance(value, LongText):
        return _checked_long(value, key, file, line)
    if not isinstance(value, str):
        return Rejected(f"{key!r} is {_named(value)}, not a string", repr(value), file, line)
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        shown = value.encode("utf-8", "backslashreplace").decode()
        return Rejected(f"{key!r} is not valid Unicode (lone surrogate at character {error.start})", shown, file, line)
    return Document(value, size, file, line)


def _checked_long(text: LongText, key: str, file: str, line: int) -> Document | Rejected:
    if text.lone_surrogate is None:
        return Document("", text.size, file, line, long=text)
    with text:
        reason = f"{key!r} is not valid Unicode (lone surrogate at character {text.lone_surrogate})"
        return Rejected(reason, next(text.blocks()), file, line)


def _named(value: object) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", int: "a number"}
    return names.get(type(value), f"of type {type(value).__name__}")


def damaged(error: Exception, file: str, line: int) -> Rejected:
    """What stands in the place of all that follows the damage."""
    return Rejected(f"cannot be read to its end ({error}); is the file damaged or truncated?", "", file, line)


def of_record(
    record: object, key: str, file: str, line: int, whole: bool, strings: dict[str, LongText]
) -> Document | Rejected:
    """The document of a record, in which names stand for long `strings`."""
    if not isinstance(record, dict):
        return Rejected(f"the record is {_named(record)}, not an object", "", file, line)
    value = lookup(record, key)
    if strings:
        value = strings.pop(value, value) if isinstance(value, str) else value
        _close(strings, json.dumps(record))
    if value is ABSENT:
        return Rejected(f"no key {key!r}; the keys are {key_names(record)}", "", file, line)
    return with_record(checked(value, key, file, line), record if whole else None)


def _close(strings: dict[str, LongText], record: str) -> None:
    """Remove those that a record names: nobody asked for them."""
    for name in [name for name in strings if name in record]:
        with strings.pop(name):
            pass


def with_record(item: Document | Rejected, record: dict[str, Any] | None) -> Document | Rejected:
    """A document with its record, if that is wanted."""
    return item._replace(record=record) if record is not None and isinstance(item, Document) else item


def key_names(record: dict[str, Any]) -> str:
    """The keys of a record as one may name them; of objects in it, theirs."""
    names = (
        [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key] for key, value in record.items()
    )
    return ", ".join(name for group in names for name in group) or "none"


def escaped(raw: bytes) -> str:
    """A line as text, with its bytes that are no UTF-8 spelt."""
    return raw.decode("utf-8", "backslashreplace").rstrip("\n")
