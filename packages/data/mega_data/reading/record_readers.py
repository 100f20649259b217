"""Readers of records: Parquet, JSON lines, and JSON objects one after another or in an array.

Parquet is read with one batch of rows in memory, because a small file may expand to any size. Lines of JSON have any
length; a record has up to `MAX_RECORD_BYTES`, not counting long texts.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from mega_common.bounded_parsing import explain_read_error, reject_conflicting_keys
from mega_common.errors import DataError
from mega_data.reading.corpus_sources import BOM, WHOLE, CorpusSource, lookup_record_value
from mega_data.reading.decompression import DAMAGE, ReportBytes, import_optional_package, open_decompressed
from mega_data.reading.documents import (
    BLOCK,
    LONG,
    MAX_RECORD_BYTES,
    MAX_TEXT_BYTES,
    SHOWN,
    DiskBackedText,
    Document,
    DocumentStream,
    RejectedItem,
    attach_record,
    decode_blocks,
    document_from_record,
    document_from_text,
    escape_invalid_utf8,
    explain_too_large,
    extract_long_strings,
    iterate_blocks,
    no_column_error,
    reject_damaged_rest,
)

BATCH_ROWS = 256
DENSE_RATIO = 100  # compression ratio above which rows are converted one at a time
MAX_GROUP_BYTES = 1 << 30  # decompressed size of a row group with a higher compression ratio


def read_parquet_documents(source: CorpusSource, key: str, advance: ReportBytes, whole: bool) -> DocumentStream:
    """Yield the documents of a Parquet file, with the text in column `key`.
    `whole` attaches all columns of the row as the document's record.

    Raises:
        DataError: if the file cannot be opened, or the column is missing.
        MissingPackageError: if pyarrow is not installed.
    """
    parquet = import_optional_package("pyarrow.parquet", "reading Parquet files")
    arrow = import_optional_package("pyarrow", "reading Parquet files")
    line = 0
    try:
        with contextlib.ExitStack() as stack:
            remote = "://" in source.name
            path = stack.enter_context(open_decompressed(source.name, lambda _: None)) if remote else source.name
            file = stack.enter_context(parquet.ParquetFile(path))
            names = _list_columns(file.schema_arrow, arrow.types.is_struct)
            if key not in names and key != WHOLE:
                raise no_column_error(source.name, key, ", ".join(names))
            columns = None if whole or key == WHOLE else [key]
            rows = max(file.metadata.num_rows, 1)
            groups, line = _select_row_groups(file.metadata, source)
            size, dense, reason = _plan_batches(file.metadata, groups, columns)
            if reason:
                yield RejectedItem(f"{reason}; the file is skipped", "", source.name, line + 1)
                return
            if dense:  # keep repeated values dictionary-encoded
                file = stack.enter_context(parquet.ParquetFile(path, read_dictionary=columns or names))
            for batch in file.iter_batches(columns=columns, batch_size=size, row_groups=groups):
                for record in _iterate_rows(batch) if dense else batch.to_pylist():
                    line += 1
                    yield attach_record(
                        document_from_text(lookup_record_value(record, key), key, source.name, line),
                        record if whole else None,
                    )
                advance(source.size * batch.num_rows // rows)
    except (OSError, ValueError, arrow.ArrowException) as error:
        if not line:
            raise DataError(f"{source.name}: cannot be read as Parquet ({explain_read_error(error)})") from error
        yield reject_damaged_rest(error, source.name, line + 1)


def _plan_batches(metadata: Any, groups: Sequence[int], columns: Sequence[str] | None) -> tuple[int, bool, str]:
    """Return the batch size in rows, whether rows are highly compressed, and the reason to skip the file or ""."""
    size, dense = BATCH_ROWS, False
    for number in groups:
        group = metadata.row_group(number)
        all_chunks = [group.column(index) for index in range(group.num_columns)]
        chunks = [chunk for chunk in all_chunks if not columns or chunk.path_in_schema.startswith(columns[0])]
        expanded = sum(chunk.total_uncompressed_size for chunk in chunks)
        ratio = expanded / max(sum(chunk.total_compressed_size for chunk in chunks), 1)
        row = expanded // max(group.num_rows, 1)
        dense |= ratio > DENSE_RATIO
        if row > MAX_TEXT_BYTES * max(len(chunks), 1):
            return size, dense, f"row group {number}: its rows are {explain_too_large(MAX_TEXT_BYTES)}"
        if ratio > DENSE_RATIO and expanded > MAX_GROUP_BYTES:
            return size, dense, f"row group {number} expands to {expanded:,} bytes, {ratio:,.0f} times its size"
        size = max(1, min(size, MAX_TEXT_BYTES // max(row, 1)))
    return size, dense, ""


def _iterate_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow batch, each converted on demand."""
    columns = {name: batch.column(number) for number, name in enumerate(batch.schema.names)}
    for row in range(batch.num_rows):
        yield {name: column[row].as_py() for name, column in columns.items()}


def _select_row_groups(metadata: Any, source: CorpusSource) -> tuple[list[int], int]:
    """Return the row groups that begin in a source's range (assuming equal sizes), and the number of rows before them."""
    count, end = metadata.num_row_groups, source.size if source.end is None else source.end
    groups = [group for group in range(count) if source.begin <= source.size * group // count < end]
    before = range(groups[0]) if groups else ()
    return groups, sum(metadata.row_group(group).num_rows for group in before)


def _list_columns(columns: Iterable[Any], is_struct: Callable[[Any], bool], prefix: str = "") -> list[str]:
    """Return the columns of an Arrow schema, those in structs as `a.b`."""
    names: list[str] = []
    for column in columns:
        name = prefix + column.name
        names += _list_columns(column.type, is_struct, f"{name}.") if is_struct(column.type) else [name]
    return names


SEPARATORS = re.compile(r"[ \t\r\n,\[\]]*")  # between objects, in an array or not


def read_json_lines_documents(
    stream: io.BufferedReader,
    source: CorpusSource,
    key: str,
    on_lines: Callable[[int], object],
    whole: bool,
    folder: Path | None,
) -> DocumentStream:
    """Yield one document per non-blank line of a JSON lines file, with the text under `key`.
    `on_lines` is called at the end with the number of lines.
    """
    line, longest = 0, LONG if folder else MAX_RECORD_BYTES
    try:
        for line, (raw, rest) in enumerate(_iterate_lines(stream, source.begin, source.end, longest), 1):
            if line == 1 and not source.begin:
                raw = raw.removeprefix(BOM)
            if rest is not None:
                if folder is None:
                    yield RejectedItem(
                        explain_too_large(longest), escape_invalid_utf8(raw[:SHOWN]), source.display_name, line
                    )
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
        return RejectedItem(f"not UTF-8 (byte {error.start} of the line)", escape_invalid_utf8(raw), file, line)
    except json.JSONDecodeError as error:
        return RejectedItem(f"not JSON ({_explain_json_error(error)})", escape_invalid_utf8(raw), file, line)
    except (ValueError, RecursionError) as error:
        return RejectedItem(f"not JSON ({error})", escape_invalid_utf8(raw), file, line)
    item = document_from_record(record, key, file, line, whole, {})
    return item._replace(content=escape_invalid_utf8(raw)) if isinstance(item, RejectedItem) else item


def _parse_record(text: str, key: str) -> Any:
    """Parse a JSON line; if the name of `key` occurs twice, reject an object that gives a key two values.

    Raises:
        ValueError: if it is not JSON, or a key has two values.
    """
    name = key.rpartition(".")[2]
    if key == WHOLE or text.count(f'"{name}"') > 1:
        return json.loads(text, object_pairs_hook=reject_conflicting_keys)
    return json.loads(text)


def _explain_json_error(error: json.JSONDecodeError) -> str:
    """Return the problem of a line that is not JSON, with its column."""
    unclosed = error.msg.startswith(("Unterminated string", "Invalid control character"))
    return f"column {error.pos + 1}: " + ("a text in quotation marks is not closed" if unclosed else error.msg)


def _parse_long_line(
    begin: bytes, rest: Iterator[bytes], key: str, file: str, line: int, folder: Path
) -> Document | RejectedItem:
    """Parse a line of any length; the content of a bad line is truncated to `SHOWN` bytes."""
    strings: dict[str, DiskBackedText] = {}
    shown = escape_invalid_utf8(begin[:SHOWN])
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


def read_json_documents(
    stream: io.BufferedReader, source: CorpusSource, key: str, whole: bool, folder: Path | None
) -> DocumentStream:
    """Yield one document per JSON object of a file, with the text under `key`.
    Objects are one after another or in an array, in any layout; `line` counts the objects.
    """
    line, strings = 0, dict[str, DiskBackedText]()
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
    except json.JSONDecodeError as error:
        cut = error.msg.startswith("Unterminated string") or error.pos >= len(error.doc.rstrip())
        reason = f"record {line + 1} is cut off, the file is truncated" if cut else f"record {line + 1}: {error.msg}"
        yield RejectedItem(f"not JSON ({reason}); the rest of the file cannot be read", "", source.name, line + 1)
    except (ValueError, RecursionError) as error:
        yield RejectedItem(f"not JSON ({error}); the rest of the file cannot be read", "", source.name, line + 1)


def _iterate_values(blocks: Iterator[str]) -> Iterator[object]:
    """Yield the values of a JSON text, or of its top-level array, with at most one value in memory."""
    decoder = json.JSONDecoder(object_pairs_hook=reject_conflicting_keys)
    text, at, more = next(blocks, "").removeprefix("\ufeff"), 0, True
    failure: Exception | None = None  # error of reading the next block
    open_arrays = 0
    while True:
        begin, at = at, SEPARATORS.match(text, at).end()  # type: ignore[union-attr]  # it matches an empty string as well
        open_arrays += text.count("[", begin, at) - text.count("]", begin, at)
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
            if open_arrays > 0:
                raise ValueError("the array has no closing bracket, the file is truncated")
            return
        text, at, target = text[at:], 0, 2 * (len(text) - at)
        while more and len(text) <= target:
            try:
                block = next(blocks, None)
            except (ValueError, *DAMAGE) as error:
                block, failure = None, error
            more = block is not None
            text += block or ""
