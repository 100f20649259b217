"""Sources to documents: JSON lines, JSON, CSV, Parquet, plain text and code, HuggingFace `datasets`.

`read` goes through one source and yields each `Document`, or a `Rejected` where there is none to be had, with the place
it came from. What to do about a `Rejected` is the caller's business.
"""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from mega_common.errors import DataError
from mega_data.reading.documents import Document, Items, Rejected, checked, damaged, escaped, key_names, with_record
from mega_data.reading.json_readers import read_json, read_jsonl
from mega_data.reading.long_text import LONG, LongText, decoded, in_blocks
from mega_data.reading.sources import (
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
from mega_data.reading.unpack import DAMAGE, Advance, head, opened, package


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
            yield damaged(error, source.name, 1)._replace(left_out=source.found and source.kind is None)
            return
        kind = source.kind or kind_by_content(begin, json_key, Path(source.name))
        tell_kind(kind)
        if kind == "parquet":
            yield from _read_parquet(source, json_key, advance, whole)
        elif kind == "jsonl":
            yield from read_jsonl(stream, source, json_key, tell_lines, whole, folder)
        elif kind == "json":
            yield from read_json(stream, source, json_key, whole, folder)
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
                yield with_record(checked(value, key, source.name, rows.line_num), record if whole else None)
            elif row:
                yield Rejected(f"no column {key!r} in this row", str(row), source.name, rows.line_num)
    except UnicodeDecodeError:
        yield Rejected("not UTF-8; what follows is not read", "", source.name, rows.line_num + 1)
    except (*DAMAGE, csv.Error) as error:
        yield damaged(error, source.name, rows.line_num + 1)


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
        yield Rejected(reason, escaped(raw[:200]), source.name, 1, left_out=source.found)
    except DAMAGE as error:
        yield damaged(error, source.name, 1)
    else:
        if source.found and "\0" in text:
            yield Rejected("no UTF-8 text", "", source.name, 1, left_out=True)
        else:
            yield checked(text, "the text", source.name, 1)


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
                    yield with_record(checked(lookup(record, key), key, source.name, line), record if whole else None)
                advance(source.size * batch.num_rows // rows)
    except (OSError, ValueError, arrow.ArrowException) as error:
        if not line:
            raise DataError(f"{source.name}: cannot be read as Parquet ({error})") from error
        yield damaged(error, source.name, line + 1)


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
                raise DataError(f"{source.name}: no column {key!r}", hint=f"the columns are {key_names(row)}")
            yield with_record(checked(value, key, source.name, line), dict(row) if whole else None)
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
