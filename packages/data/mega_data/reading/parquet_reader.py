"""Reader of Parquet files, with one batch of rows in memory, because a small file may expand to any size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mega_common.bounded_parsing import explain_read_error
from mega_common.errors import DataError
from mega_data.reading.corpus_sources import WHOLE, CorpusSource, lookup_record_value
from mega_data.reading.decompression import ReportBytes, import_optional, open_decompressed
from mega_data.reading.documents import (
    MAX_TEXT_BYTES,
    DocumentStream,
    RejectedItem,
    attach_record,
    document_from_text,
    explain_too_large,
    reject_damaged_rest,
)

BATCH_ROWS = 256
DENSE_RATIO = 100  # compression ratio above which rows are converted one at a time
MAX_GROUP_BYTES = 1 << 30  # decompressed size of a row group with a higher compression ratio


def read_parquet(source: CorpusSource, key: str, advance: ReportBytes, whole: bool) -> DocumentStream:
    """Yield the documents of a Parquet file, with the text in column `key`; `whole` attaches all columns of the row as
    the document's record.

    Raises:
        DataError: if the file cannot be opened, or the column is missing.
        MissingPackageError: if pyarrow is not installed.
    """
    parquet = import_optional("pyarrow.parquet", "reading Parquet files")
    arrow = import_optional("pyarrow", "reading Parquet files")
    line = 0
    try:
        with contextlib.ExitStack() as stack:
            remote = "://" in source.name
            path = stack.enter_context(open_decompressed(source.name, lambda _: None)) if remote else source.name
            file = stack.enter_context(parquet.ParquetFile(path))
            names = _list_columns(file.schema_arrow, arrow.types.is_struct)
            if key not in names and key != WHOLE:
                raise DataError(f"{source.name}: no column {key!r}", hint=f"the columns are {', '.join(names)}")
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
