"""JSON lines and JSON to documents, of any length of lines and texts."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from mega_data.reading.documents import Document, Items, Rejected, damaged, escaped, of_record
from mega_data.reading.long_text import BLOCK, LONG, LongText, decoded, in_blocks, shorten
from mega_data.reading.sources import BOM, Source
from mega_data.reading.unpack import DAMAGE

SHOWN = 1 << 16  # bytes of a bad line that is long
BETWEEN = re.compile(r"[ \t\r\n,\[\]]*")  # what stands between the objects of an array, or of no array
LARGEST_VALUE = 1 << 30  # characters of one JSON value; what looks longer has a quotation mark too few


def read_jsonl(
    stream: io.BufferedReader,
    source: Source,
    key: str,
    tell_lines: Callable[[int], object],
    whole: bool,
    folder: Path | None,
) -> Items:
    """A document a line, blank ones aside; `tell_lines` is told, at the end, how many there were."""
    line = 0
    try:
        for line, (raw, rest) in enumerate(_lines(stream, source.begin, source.end, LONG if folder else -1), 1):
            if line == 1 and not source.begin:
                raw = raw.removeprefix(BOM)
            if rest is not None and folder is not None:
                yield _parsed_long(raw, rest, key, source.shown, line, folder)
            elif not raw.isspace():
                yield _parsed(raw, key, source.shown, line, whole)
        tell_lines(line)
    except DAMAGE as error:
        yield damaged(error, source.shown, line + 1)


def _lines(
    stream: io.BufferedReader, begin: int, end: int | None, longest: int
) -> Iterator[tuple[bytes, Iterator[bytes] | None]]:
    """The lines that begin in a range of bytes, the first of them with it.

    Of a line longer than `longest` bytes these, and an iterator over the others.
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
        for _ in rest:  # of a bad line
            pass
        at = at if end is None else stream.tell()


def _rest_of_line(stream: io.BufferedReader) -> Iterator[bytes]:
    part = b""
    while not part.endswith(b"\n") and (part := stream.readline(BLOCK)):
        yield part


def _parsed(raw: bytes, key: str, file: str, line: int, whole: bool) -> Document | Rejected:
    try:
        record = json.loads(raw.decode())
    except UnicodeDecodeError as error:
        return Rejected(f"not UTF-8 (byte {error.start} of the line)", escaped(raw), file, line)
    except (ValueError, RecursionError) as error:
        return Rejected(f"not JSON ({error})", escaped(raw), file, line)
    item = of_record(record, key, file, line, whole, {})
    return item._replace(content=escaped(raw)) if isinstance(item, Rejected) else item


def _parsed_long(
    begin: bytes, rest: Iterator[bytes], key: str, file: str, line: int, folder: Path
) -> Document | Rejected:
    """Likewise of a line of any length, of which a bad one's begin is shown alone."""
    strings: dict[str, LongText] = {}
    shown = escaped(begin[:SHOWN])
    kept = f"; the first {SHOWN} bytes of a long line are shown"
    try:
        record = json.loads("".join(shorten(decoded(chain([begin], rest)), folder, strings)))
    except UnicodeDecodeError as error:
        return Rejected(f"not UTF-8 (byte {error.start} of the line){kept}", shown, file, line)
    except json.JSONDecodeError as error:  # its place is one in what is left of the line
        return Rejected(f"not JSON ({error.msg}){kept}", shown, file, line)
    except (ValueError, RecursionError) as error:
        return Rejected(f"not JSON ({error}){kept}", shown, file, line)
    item = of_record(record, key, file, line, False, strings)
    return item._replace(reason=item.reason + kept, content=shown) if isinstance(item, Rejected) else item


def read_json(stream: io.BufferedReader, source: Source, key: str, whole: bool, folder: Path | None) -> Items:
    """Objects one after another or in an array, however they are laid out; `line` counts them."""
    line, strings = 0, dict[str, LongText]()
    blocks = decoded(in_blocks(stream))
    try:
        values = _values(shorten(blocks, folder, strings) if folder else blocks)
        for line, record in enumerate(values, 1):
            item = of_record(record, key, source.name, line, whole, strings)
            yield item._replace(content=json.dumps(record)) if isinstance(item, Rejected) else item
    except UnicodeDecodeError:
        yield Rejected("not UTF-8", "", source.name, line + 1)
    except DAMAGE as error:
        yield damaged(error, source.name, line + 1)
    except (ValueError, RecursionError) as error:
        yield Rejected(f"not JSON ({error}); what follows is not read", "", source.name, line + 1)


def _values(blocks: Iterator[str]) -> Iterator[object]:
    """The values of a JSON text, or of the array that it is, while no more than one of them is in memory."""
    decoder = json.JSONDecoder()
    text, at, more = next(blocks, "").removeprefix("\ufeff"), 0, True
    failure: Exception | None = None  # of what follows the text
    while True:
        at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing as well
        try:
            if at < len(text):
                value, at = decoder.raw_decode(text, at)
                yield value
                continue
        except json.JSONDecodeError as error:
            unfinished = error.pos > len(text) - 16 or error.msg.startswith("Unterminated string")
            if not more or not unfinished or len(text) - at > LARGEST_VALUE:
                raise (failure or error) from None
        if failure is not None:
            raise failure
        if not more:
            return
        text, at, wanted = text[at:], 0, 2 * (len(text) - at)
        while more and len(text) <= wanted:
            try:
                block = next(blocks, None)
            except (ValueError, *DAMAGE) as error:
                block, failure = None, error
            more = block is not None
            text += block or ""
