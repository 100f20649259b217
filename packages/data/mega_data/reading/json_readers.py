"""Readers of JSON lines and JSON, with lines and texts of any length."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from mega_common.bounded_parsing import reject_duplicate_keys
from mega_data.reading.corpus_sources import BOM, WHOLE, CorpusSource
from mega_data.reading.decompression import DAMAGE
from mega_data.reading.documents import (
    MAX_RECORD_BYTES,
    SHOWN,
    Document,
    DocumentStream,
    RejectedItem,
    document_from_record,
    escape_bytes,
    explain_too_large,
    reject_damaged_rest,
)
from mega_data.reading.long_text import BLOCK, LONG, LongText, decode_blocks, extract_long_strings, iterate_blocks

SEPARATORS = re.compile(r"[ \t\r\n,\[\]]*")  # between objects, in an array or not


def read_json_lines(
    stream: io.BufferedReader,
    source: CorpusSource,
    key: str,
    on_lines: Callable[[int], object],
    whole: bool,
    folder: Path | None,
) -> DocumentStream:
    """Yield one document per non-blank line of a JSON lines file, with the text under `key`; `on_lines` is called at
    the end with the number of lines.
    """
    line, longest = 0, LONG if folder else MAX_RECORD_BYTES
    try:
        for line, (raw, rest) in enumerate(_iterate_lines(stream, source.begin, source.end, longest), 1):
            if line == 1 and not source.begin:
                raw = raw.removeprefix(BOM)
            if rest is not None:
                if folder is None:
                    yield RejectedItem(explain_too_large(longest), escape_bytes(raw[:SHOWN]), source.display_name, line)
                else:
                    yield _parse_long_line(raw, rest, key, source.display_name, line, folder)
            elif not raw.isspace():
                yield _parse_line(raw, key, source.display_name, line, whole)
        on_lines(line)
    except DAMAGE as error:
        yield reject_damaged_rest(error, source.display_name, line + 1)


def _iterate_lines(
    stream: io.BufferedReader, begin: int, end: int | None, longest: int
) -> Iterator[tuple[bytes, Iterator[bytes] | None]]:
    """Yield the lines that begin in a range of bytes; the first one begins at `begin`.

    A line longer than `longest` bytes is its first `longest` bytes and an iterator over the rest.
    """
    at = begin
    if begin:
        stream.seek(begin)
    while (end is None or at < end) and (raw := stream.readline(longest)):
        if len(raw) != longest or raw.endswith(b"\n"):
            yield raw, None
            at += len(raw)
            continue
        rest = _rest_of_line(stream)
        yield raw, rest
        for _ in rest:  # skip the unread rest of a bad line
            pass
        at = at if end is None else stream.tell()


def _rest_of_line(stream: io.BufferedReader) -> Iterator[bytes]:
    part = b""
    while not part.endswith(b"\n") and (part := stream.readline(BLOCK)):
        yield part


def _parse_line(raw: bytes, key: str, file: str, line: int, whole: bool) -> Document | RejectedItem:
    try:
        record = _parse_record(raw.decode(), key)
    except UnicodeDecodeError as error:
        return RejectedItem(f"not UTF-8 (byte {error.start} of the line)", escape_bytes(raw), file, line)
    except (ValueError, RecursionError) as error:
        return RejectedItem(f"not JSON ({error})", escape_bytes(raw), file, line)
    item = document_from_record(record, key, file, line, whole, {})
    return item._replace(content=escape_bytes(raw)) if isinstance(item, RejectedItem) else item


def _parse_record(text: str, key: str) -> Any:
    """Parse a JSON line; if the name of `key` occurs twice, reject an object that gives a key two values.

    Raises:
        ValueError: if it is not JSON, or a key has two values.
    """
    name = key.rpartition(".")[2]
    if key == WHOLE or text.count(f'"{name}"') > 1:
        return json.loads(text, object_pairs_hook=reject_duplicate_keys)
    return json.loads(text)


def _parse_long_line(
    begin: bytes, rest: Iterator[bytes], key: str, file: str, line: int, folder: Path
) -> Document | RejectedItem:
    """Parse a line of any length; the content of a bad line is truncated to `SHOWN` bytes."""
    strings: dict[str, LongText] = {}
    shown = escape_bytes(begin[:SHOWN])
    suffix = f"; the first {SHOWN} bytes of a long line are shown"
    try:
        record = json.loads(_join_blocks(extract_long_strings(decode_blocks(chain([begin], rest)), folder, strings)))
    except UnicodeDecodeError as error:
        return RejectedItem(f"not UTF-8 (byte {error.start} of the line){suffix}", shown, file, line)
    except json.JSONDecodeError as error:  # its position is that in the shortened line
        return RejectedItem(f"not JSON ({error.msg}){suffix}", shown, file, line)
    except _TooLargeError:
        return RejectedItem(f"{explain_too_large(MAX_RECORD_BYTES)}{suffix}", shown, file, line)
    except (ValueError, RecursionError) as error:
        return RejectedItem(f"not JSON ({error}){suffix}", shown, file, line)
    item = document_from_record(record, key, file, line, False, strings)
    return item._replace(reason=item.reason + suffix, content=shown) if isinstance(item, RejectedItem) else item


class _TooLargeError(ValueError):
    """A JSON value larger than `MAX_RECORD_BYTES`."""


def _join_blocks(parts: Iterator[str]) -> str:
    """Return the parts of a text as one.

    Raises:
        _TooLargeError: if they are larger than `MAX_RECORD_BYTES`.
    """
    blocks, size = [], 0
    for part in parts:
        size += len(part)
        if size > MAX_RECORD_BYTES:
            raise _TooLargeError
        blocks.append(part)
    return "".join(blocks)


def read_json_values(
    stream: io.BufferedReader, source: CorpusSource, key: str, whole: bool, folder: Path | None
) -> DocumentStream:
    """Yield one document per JSON object of a file, with the text under `key`: objects one after another or in an
    array, in any layout; `line` counts the objects.
    """
    line, strings = 0, dict[str, LongText]()
    blocks = decode_blocks(iterate_blocks(stream))
    try:
        values = _iterate_values(extract_long_strings(blocks, folder, strings) if folder else blocks)
        for line, record in enumerate(values, 1):
            item = document_from_record(record, key, source.name, line, whole, strings)
            yield item._replace(content=json.dumps(record)) if isinstance(item, RejectedItem) else item
    except UnicodeDecodeError:
        yield RejectedItem("not UTF-8", "", source.name, line + 1)
    except DAMAGE as error:
        yield reject_damaged_rest(error, source.name, line + 1)
    except _TooLargeError:
        reason = (
            f"{explain_too_large(MAX_RECORD_BYTES)}, or a quotation mark is missing; the rest of the file is skipped"
        )
        yield RejectedItem(reason, "", source.name, line + 1)
    except (ValueError, RecursionError) as error:
        yield RejectedItem(f"not JSON ({error}); the rest of the file is skipped", "", source.name, line + 1)


def _iterate_values(blocks: Iterator[str]) -> Iterator[object]:
    """Yield the values of a JSON text, or of its top-level array, with at most one value in memory."""
    decoder = json.JSONDecoder(object_pairs_hook=reject_duplicate_keys)
    text, at, more = next(blocks, "").removeprefix("\ufeff"), 0, True
    failure: Exception | None = None  # error of reading the next block
    while True:
        at = SEPARATORS.match(text, at).end()  # type: ignore[union-attr]  # it matches an empty string as well
        try:
            if at < len(text):
                value, at = decoder.raw_decode(text, at)
                yield value
                continue
        except json.JSONDecodeError as error:
            unfinished = error.pos > len(text) - 16 or error.msg.startswith("Unterminated string")
            if not more or not unfinished:
                raise (failure or error) from None
            if len(text) - at > MAX_RECORD_BYTES:
                raise _TooLargeError(explain_too_large(MAX_RECORD_BYTES)) from None
        if failure is not None:
            raise failure
        if not more:
            return
        text, at, target = text[at:], 0, 2 * (len(text) - at)
        while more and len(text) <= target:
            try:
                block = next(blocks, None)
            except (ValueError, *DAMAGE) as error:
                block, failure = None, error
            more = block is not None
            text += block or ""
