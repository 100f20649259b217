"""Parquet to documents, a batch of rows in memory at a time: a small file may expand to any size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mega_common.bounded_parsing import explain_read_error
from mega_common.errors import DataError
from mega_data.reading.corpus_sources import WHOLE, CorpusSource, lookup_key
from mega_data.reading.decompression import ReportBytes, import_optional, open_decompressed
from mega_data.reading.documents import (
    LARGEST_TEXT,
    DocumentStream,
    RejectedItem,
    attach_record,
    document_from_text,
    explain_too_large,
    reject_damaged_rest,
)

ROWS = 256  # of a batch
USUAL_RATIO = 100  # of bytes decompressed to compressed ones; beyond it each row is made when it is asked for
LARGEST_GROUP = 1 << 30  # bytes of a row group that is compressed more than that


def read_parquet(source: CorpusSource, key: str, advance: ReportBytes, whole: bool) -> DocumentStream:
    """Read the documents of a Parquet file; `whole`: with all columns of their rows.

    Raises:
        DataError: when the file cannot be opened, or has no such column.
        MissingPackageError: when pyarrow is not installed.
    """
    parquet = import_optional("pyarrow.parquet", "Parquet files")
    arrow = import_optional("pyarrow", "Parquet files")
    line = 0
    try:
        with contextlib.ExitStack() as stack:
            remote = "://" in source.name
            where = stack.enter_context(open_decompressed(source.name, lambda _: None)) if remote else source.name
            file = stack.enter_context(parquet.ParquetFile(where))
            names = _leaves(file.schema_arrow, arrow.types.is_struct)
            if key not in names and key != WHOLE:
                raise DataError(f"{source.name}: no column {key!r}", hint=f"the columns are {', '.join(names)}")
            columns = None if whole or key == WHOLE else [key]
            rows = max(file.metadata.num_rows, 1)
            groups, line = _row_groups(file.metadata, source)
            size, dense, reason = _bounds(file.metadata, groups, columns)
            if reason:
                yield RejectedItem(f"{reason}; the file is not read", "", source.name, line + 1)
                return
            if dense:  # repeated values then stay in the dictionary that the file has them in
                file = stack.enter_context(parquet.ParquetFile(where, read_dictionary=columns or names))
            for batch in file.iter_batches(columns=columns, batch_size=size, row_groups=groups):
                for record in _records(batch) if dense else batch.to_pylist():
                    line += 1
                    yield attach_record(
                        document_from_text(lookup_key(record, key), key, source.name, line), record if whole else None
                    )
                advance(source.size * batch.num_rows // rows)
    except (OSError, ValueError, arrow.ArrowException) as error:
        if not line:
            raise DataError(f"{source.name}: cannot be read as Parquet ({explain_read_error(error)})") from error
        yield reject_damaged_rest(error, source.name, line + 1)


def _bounds(metadata: Any, groups: Sequence[int], columns: Sequence[str] | None) -> tuple[int, bool, str]:
    """Return how many rows to decode at once, whether some are compressed unusually, and why they cannot be read, if so."""
    size, dense = ROWS, False
    for number in groups:
        group = metadata.row_group(number)
        every = [group.column(at) for at in range(group.num_columns)]
        chunks = [one for one in every if not columns or one.path_in_schema.startswith(columns[0])]
        expanded = sum(chunk.total_uncompressed_size for chunk in chunks)
        ratio = expanded / max(sum(chunk.total_compressed_size for chunk in chunks), 1)
        row = expanded // max(group.num_rows, 1)
        dense |= ratio > USUAL_RATIO
        if row > LARGEST_TEXT * max(len(chunks), 1):
            return size, dense, f"row group {number}: its rows are {explain_too_large(LARGEST_TEXT)}"
        if ratio > USUAL_RATIO and expanded > LARGEST_GROUP:
            return size, dense, f"row group {number} expands to {expanded:,} bytes, {ratio:,.0f} times its size"
        size = max(1, min(size, LARGEST_TEXT // max(row, 1)))
    return size, dense, ""


def _records(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow batch, each made when it is asked for."""
    columns = {name: batch.column(number) for number, name in enumerate(batch.schema.names)}
    for row in range(batch.num_rows):
        yield {name: column[row].as_py() for name, column in columns.items()}


def _row_groups(metadata: Any, source: CorpusSource) -> tuple[list[int], int]:
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
