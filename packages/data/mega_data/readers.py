"""Sources to documents: JSON lines, JSON, CSV, Parquet, plain text and code, HuggingFace `datasets`.

`read` goes through one source and yields each `Document`, or a `Rejected` where there is none to be had, with the place
it came from. What to do about a `Rejected` is the caller's business.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from mega_common.errors import DataError
from mega_data.chat.template import Rendered
from mega_data.long_text import BLOCK, LONG, LongText, decoded, in_blocks, shorten
from mega_data.sources import (
    ABSENT,
    BOM,
    WHOLE,
    Kind,
    LeftOut,
    Source,
    describe,
    find_sources,
    kind_by_content,
    lookup,
)
from mega_data.unpack import DAMAGE, Advance, head, opened, package

SHOWN = 1 << 16  # bytes of a bad line that is long
BETWEEN = re.compile(r"[ \t\r\n,\[\]]*")  # what stands between the objects of an array, or of no array
LARGEST_VALUE = 1 << 30  # characters of one JSON value; what looks longer has a quotation mark too few


class Document(NamedTuple):
    """A text of `size` UTF-8 bytes, and where it stands (`line` counts from 1; rows, records and JSON values too).

    `record` is all that stands there beside the text, where `read` was asked for it and the format has more.
    `chats` are the conversations that a record was, `long` is a text too long to be held; there is no other text then.
    """

    text: str
    size: int
    file: str
    line: int
    chats: tuple[Rendered, ...] = ()
    record: dict[str, Any] | None = None
    long: LongText | None = None

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


def read(
    source: Source,
    json_key: str,
    advance: Advance = lambda _: None,
    tell_kind: Callable[[Kind], object] = lambda _: None,
    tell_lines: Callable[[int], object] = lambda _: None,
    *,
    whole: bool = False,
    folder: Path | None = None,
) -> Items:
    """The documents of a source; `advance` is told the bytes of the file as they are consumed, `tell_kind` how it is read.

    `tell_lines` is told, at the end of JSON lines, their number. `whole`: documents come with their records, all
    columns of them. `folder`: where long texts of plain text, JSON lines and JSON are put; without it they are held.

    What of a damaged file comes before the damage is read; the damage is a `Rejected`.

    Raises:
        DataError: when a file cannot be opened, or has no such column.
        MissingPackageError: when its format needs a package that is not installed.
    """
    if source.kind in ("datasets", "parquet"):
        tell_kind(source.kind)
        if source.kind == "datasets":
            yield from _read_datasets(source, json_key, whole)
        else:
            yield from _read_parquet(source, json_key, advance, whole)
        return
    with opened(source.name, advance) as stream:
        try:
            begin = head(stream)
        except DAMAGE as error:  # among source code, some program's broken example
            yield _damaged(error, source.name, 1)._replace(left_out=source.found and source.kind is None)
            return
        kind = source.kind or kind_by_content(begin, json_key, Path(source.name))
        tell_kind(kind)
        if kind == "parquet":
            yield from _read_parquet(source, json_key, advance, whole)
        elif kind == "jsonl":
            yield from _read_jsonl(stream, source, json_key, tell_lines, whole, folder)
        elif kind == "json":
            yield from _read_json(stream, source, json_key, whole, folder)
        elif kind == "text":
            yield from _read_text(stream, source, folder)
        else:
            yield from _read_csv(stream, source, json_key, whole)


def texts(inputs: Sequence[str | Path], json_key: str = "text") -> Iterator[str]:
    """The text of every document, for training a tokenizer; binary files of folders are passed over.

    Raises:
        DataError: at the first place without a usable document.
    """
    left_out, kinds = LeftOut(), Counter[Kind]()
    for source in find_sources(inputs, json_key, left_out):
        for item in read(source, json_key, tell_kind=lambda kind: kinds.update([kind])):
            if isinstance(item, Document):
                yield item.text
            elif item.left_out:
                left_out.add(item.reason, [item.file])
            else:
                raise DataError(f"{item.file}:{item.line}: {item.reason}")
    describe(kinds)
    left_out.tell()


def _checked(value: object, key: str, file: str, line: int) -> Document | Rejected:
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


def _damaged(error: Exception, file: str, line: int) -> Rejected:
    return Rejected(f"cannot be read to its end ({error}); is the file damaged or truncated?", "", file, line)


def _of_record(
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
        return Rejected(f"no key {key!r}; the keys are {_keys(record)}", "", file, line)
    return _with(_checked(value, key, file, line), record if whole else None)


def _close(strings: dict[str, LongText], record: str) -> None:
    """Remove those that a record names: nobody asked for them."""
    for name in [name for name in strings if name in record]:
        with strings.pop(name):
            pass


def _with(item: Document | Rejected, record: dict[str, Any] | None) -> Document | Rejected:
    return item._replace(record=record) if record is not None and isinstance(item, Document) else item


def _keys(record: dict[str, Any]) -> str:
    """The keys of a record as one may name them; of objects in it, theirs."""
    names = (
        [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key] for key, value in record.items()
    )
    return ", ".join(name for group in names for name in group) or "none"


def _read_jsonl(
    stream: io.BufferedReader,
    source: Source,
    key: str,
    tell_lines: Callable[[int], object],
    whole: bool,
    folder: Path | None,
) -> Items:
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
        yield _damaged(error, source.shown, line + 1)


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
        return Rejected(f"not UTF-8 (byte {error.start} of the line)", _shown(raw), file, line)
    except (ValueError, RecursionError) as error:
        return Rejected(f"not JSON ({error})", _shown(raw), file, line)
    item = _of_record(record, key, file, line, whole, {})
    return item._replace(content=_shown(raw)) if isinstance(item, Rejected) else item


def _parsed_long(
    begin: bytes, rest: Iterator[bytes], key: str, file: str, line: int, folder: Path
) -> Document | Rejected:
    """Likewise of a line of any length, of which a bad one's begin is shown alone."""
    strings: dict[str, LongText] = {}
    shown = _shown(begin[:SHOWN])
    kept = f"; the first {SHOWN} bytes of a long line are shown"
    try:
        record = json.loads("".join(shorten(decoded(chain([begin], rest)), folder, strings)))
    except UnicodeDecodeError as error:
        return Rejected(f"not UTF-8 (byte {error.start} of the line){kept}", shown, file, line)
    except json.JSONDecodeError as error:  # its place is one in what is left of the line
        return Rejected(f"not JSON ({error.msg}){kept}", shown, file, line)
    except (ValueError, RecursionError) as error:
        return Rejected(f"not JSON ({error}){kept}", shown, file, line)
    item = _of_record(record, key, file, line, False, strings)
    return item._replace(reason=item.reason + kept, content=shown) if isinstance(item, Rejected) else item


def _shown(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace").rstrip("\n")


def _read_json(stream: io.BufferedReader, source: Source, key: str, whole: bool, folder: Path | None) -> Items:
    """Objects one after another or in an array, however they are laid out; `line` counts them."""
    line, strings = 0, dict[str, LongText]()
    blocks = decoded(in_blocks(stream))
    try:
        values = _values(shorten(blocks, folder, strings) if folder else blocks)
        for line, record in enumerate(values, 1):
            item = _of_record(record, key, source.name, line, whole, strings)
            yield item._replace(content=json.dumps(record)) if isinstance(item, Rejected) else item
    except UnicodeDecodeError:
        yield Rejected("not UTF-8", "", source.name, line + 1)
    except DAMAGE as error:
        yield _damaged(error, source.name, line + 1)
    except (ValueError, RecursionError) as error:
        yield Rejected(f"not JSON ({error}); what follows is not read", "", source.name, line + 1)


def _values(blocks: Iterator[str]) -> Iterator[object]:
    """The values of a JSON text, or of the array that it is, while no more than one of them is in memory."""
    decoder = json.JSONDecoder()
    text, at, more = next(blocks, "").removeprefix("\ufeff"), 0, True
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
                raise
        if not more:
            return
        text, at, wanted = text[at:], 0, 2 * (len(text) - at)
        while more and len(text) <= wanted:
            block = next(blocks, None)
            more = block is not None
            text += block or ""


def _read_csv(stream: io.BufferedReader, source: Source, key: str, whole: bool) -> Items:
    csv.field_size_limit(sys.maxsize)  # the module's own limit, 128 KiB, is for the whole process or not at all
    tab = source.kind == "tsv"
    rows = csv.reader(io.TextIOWrapper(stream, "utf-8-sig", newline=""), delimiter="\t" if tab else ",")
    try:
        header = next(rows, [])
        if key not in header and key != WHOLE:
            if source.found:
                yield Rejected(f"no column {key!r}", "", source.name, 1, left_out=True)
                return
            raise DataError(f"{source.name}: no column {key!r}", hint=f"the columns are {', '.join(header)}")
        column = -1 if key == WHOLE else header.index(key)
        for row in rows:
            if len(row) > column:
                record = dict(zip(header, row, strict=False)) if whole or key == WHOLE else {}
                value = lookup(record, key) if key == WHOLE else row[column]
                yield _with(_checked(value, key, source.name, rows.line_num), record if whole else None)
            elif row:
                yield Rejected(f"no column {key!r} in this row", str(row), source.name, rows.line_num)
    except UnicodeDecodeError:
        yield Rejected("not UTF-8; what follows is not read", "", source.name, rows.line_num + 1)
    except (*DAMAGE, csv.Error) as error:
        yield _damaged(error, source.name, rows.line_num + 1)


def _read_text(stream: io.BufferedReader, source: Source, folder: Path | None) -> Items:
    raw = b""
    try:
        raw = stream.read(LONG if folder else -1).removeprefix(BOM)
        if folder and len(raw) >= LONG - len(BOM):
            text: str | LongText = LongText.of(decoded(chain([raw], in_blocks(stream))), folder)
        else:
            text = raw.decode()
    except UnicodeDecodeError as error:
        reason = "no UTF-8 text" if source.found else f"not UTF-8 (byte {error.start} of the file)"
        yield Rejected(reason, _shown(raw[:200]), source.name, 1, left_out=source.found)
    except DAMAGE as error:
        yield _damaged(error, source.name, 1)
    else:
        if source.found and "\0" in text:
            yield Rejected("no UTF-8 text", "", source.name, 1, left_out=True)
        else:
            yield _checked(text, "the text", source.name, 1)


def _read_parquet(source: Source, key: str, advance: Advance, whole: bool) -> Items:
    parquet = package("pyarrow.parquet", "Parquet files")
    arrow = package("pyarrow", "Parquet files")
    line = 0
    try:
        with contextlib.ExitStack() as stack:
            remote = "://" in source.name
            where = stack.enter_context(opened(source.name, lambda _: None)) if remote else source.name
            file = stack.enter_context(parquet.ParquetFile(where))
            names = _leaves(file.schema_arrow, arrow.types.is_struct)
            if key not in names and key != WHOLE:
                raise DataError(f"{source.name}: no column {key!r}", hint=f"the columns are {', '.join(names)}")
            columns = None if whole or key == WHOLE else [key]
            rows = max(file.metadata.num_rows, 1)
            groups, line = _row_groups(file.metadata, source)
            for batch in file.iter_batches(columns=columns, batch_size=256, row_groups=groups):
                for record in batch.to_pylist():
                    line += 1
                    yield _with(_checked(lookup(record, key), key, source.name, line), record if whole else None)
                advance(source.size * batch.num_rows // rows)
    except (OSError, ValueError, arrow.ArrowException) as error:
        if not line:
            raise DataError(f"{source.name}: cannot be read as Parquet ({error})") from error
        yield _damaged(error, source.name, line + 1)


def _row_groups(metadata: Any, source: Source) -> tuple[list[int], int]:
    """The row groups that begin in a source's range, were all of one size, and the number of rows before them."""
    count, end = metadata.num_row_groups, source.size if source.end is None else source.end
    groups = [group for group in range(count) if source.begin <= source.size * group // count < end]
    before = range(groups[0]) if groups else ()
    return groups, sum(metadata.row_group(group).num_rows for group in before)


def _leaves(columns: Iterable[Any], is_struct: Callable[[Any], bool], prefix: str = "") -> list[str]:
    """The columns of an Arrow schema, those in structs as `a.b`."""
    names: list[str] = []
    for column in columns:
        name = prefix + column.name
        names += _leaves(column.type, is_struct, f"{name}.") if is_struct(column.type) else [name]
    return names


def _read_datasets(source: Source, key: str, whole: bool) -> Items:
    datasets = package("datasets", "hf: inputs")
    name, _at, split = source.name.removeprefix("hf:").partition("@")
    try:
        for line, row in enumerate(_load_datasets(datasets, name, split or "train"), 1):
            value = lookup(row, key)
            if value is ABSENT:
                raise DataError(f"{source.name}: no column {key!r}", hint=f"the columns are {_keys(row)}")
            yield _with(_checked(value, key, source.name, line), dict(row) if whole else None)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(f"{source.name}: `datasets` cannot load it ({error})") from error


def _load_datasets(datasets: Any, name: str, split: str) -> Iterable[dict[str, Any]]:
    folder = Path(name)
    if any((folder / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
        loaded: Any = datasets.load_from_disk(name)
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded  # type: ignore[no-any-return]
        if split not in loaded:
            raise DataError(
                f"hf:{name}: no split {split!r}", hint=f"the splits are {', '.join(loaded)}: hf:{name}@SPLIT"
            )
        return loaded[split]  # type: ignore[no-any-return]
    hub, _, config = (name, "", "") if folder.is_dir() else name.rpartition(":") if ":" in name else (name, "", "")
    return datasets.load_dataset(hub, config or None, split=split, streaming=True)  # type: ignore[no-any-return]
