"""Readers of sources: JSON lines, JSON, CSV, Parquet, plain text and code, HuggingFace `datasets`.

`read_documents` yields each `Document` of one source with its position, or a `RejectedItem` at a position without a
usable document, which the caller handles.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from mega_common.bounded_parsing import explain_read_error
from mega_common.errors import DataError
from mega_data.reading.corpus_sources import (
    ABSENT,
    BOM,
    HUB,
    WHOLE,
    CorpusSource,
    FileFormat,
    HubDatasetName,
    SkippedFiles,
    detect_file_format,
    find_corpus_sources,
    log_file_formats,
    lookup_record_value,
    split_hub_dataset_name,
)
from mega_data.reading.decompression import (
    DAMAGE,
    ReportBytes,
    import_optional_package,
    open_decompressed,
    peek_first_bytes,
)
from mega_data.reading.documents import (
    LONG,
    MAX_TEXT_BYTES,
    DiskBackedText,
    Document,
    DocumentStream,
    RejectedItem,
    attach_record,
    decode_blocks,
    document_from_text,
    escape_invalid_utf8,
    explain_too_large,
    format_key_names,
    iterate_blocks,
    no_column_error,
    reject_damaged_rest,
)
from mega_data.reading.record_readers import read_json_documents, read_json_lines_documents, read_parquet_documents


def read_documents(
    source: CorpusSource,
    json_key: str,
    advance: ReportBytes = lambda _: None,
    on_kind: Callable[[FileFormat], object] = lambda _: None,
    on_lines: Callable[[int], object] = lambda _: None,
    *,
    whole: bool = False,
    folder: Path | None = None,
) -> DocumentStream:
    """Yield the documents and rejected items of a corpus source in any supported format.
    The text is under `json_key`.

    A damaged file is read up to the damage, which is a `RejectedItem`.

    Args:
        advance: called with the number of bytes that are consumed.
        on_kind: called with the detected format.
        on_lines: called at the end of JSON lines with their number.
        whole: attach the record, with all columns, to each document.
        folder: folder for long texts of plain text, JSON lines and JSON; None keeps them in memory.

    Raises:
        DataError: if a file cannot be opened, or the column is missing.
        MissingPackageError: if the format requires a package that is not installed.
    """
    if source.kind in ("datasets", "parquet"):
        on_kind(source.kind)
        if source.kind == "datasets":
            yield from _read_datasets(source, json_key, whole)
        else:
            yield from read_parquet_documents(source, json_key, advance, whole)
        return
    with open_decompressed(source.name, advance) as stream:
        try:
            begin = peek_first_bytes(stream)
        except DAMAGE as error:  # a folder of source code may have a damaged file as a test case
            yield reject_damaged_rest(error, source.name, 1)._replace(skipped=source.found and source.kind is None)
            return
        kind = source.kind or detect_file_format(begin, json_key, Path(source.name))
        on_kind(kind)
        if kind == "parquet":
            yield from read_parquet_documents(source, json_key, advance, whole)
        elif kind == "jsonl":
            yield from read_json_lines_documents(stream, source, json_key, on_lines, whole, folder)
        elif kind == "json":
            yield from read_json_documents(stream, source, json_key, whole, folder)
        elif kind == "text":
            yield from _read_text(stream, source, folder)
        else:
            yield from _read_csv(stream, source, json_key, whole)


def iterate_document_texts(inputs: Sequence[str | Path], json_key: str = "text") -> Iterator[str]:
    """Yield the text of every document of the inputs, for training a tokenizer; binary files in folders are skipped.

    Raises:
        DataError: at the first rejected item.
    """
    skipped_files, kinds = SkippedFiles(), Counter[FileFormat]()
    for source in find_corpus_sources(inputs, json_key, skipped_files):
        for item in read_documents(source, json_key, on_kind=lambda kind: kinds.update([kind])):
            if isinstance(item, Document):
                yield item.text
            elif item.skipped:
                skipped_files.add_files(item.reason, [item.file])
            else:
                raise DataError(f"{item.file}:{item.line}: {item.reason}")
    log_file_formats(kinds)
    skipped_files.log_reasons()


def _read_csv(stream: io.BufferedReader, source: CorpusSource, key: str, whole: bool) -> DocumentStream:
    csv.field_size_limit(MAX_TEXT_BYTES)  # the module's limit, 128 KiB, can only be set for the whole process
    tab = source.kind == "tsv"
    rows = csv.reader(_csv_lines(io.TextIOWrapper(stream, "utf-8-sig", newline="")), delimiter="\t" if tab else ",")
    try:
        header = next(rows, [])
        if key not in header and key != WHOLE:
            if source.found:
                yield RejectedItem(f"no column {key!r}", "", source.name, 1, skipped=True)
                return
            raise no_column_error(source.name, key, ", ".join(header))
        column = -1 if key == WHOLE else header.index(key)
        for row in rows:
            if len(row) > column:
                record = dict(zip(header, row, strict=False)) if whole or key == WHOLE else {}
                value = lookup_record_value(record, key) if key == WHOLE else row[column]
                yield attach_record(
                    document_from_text(value, key, source.name, rows.line_num), record if whole else None
                )
            elif row:
                yield RejectedItem(f"no column {key!r} in this row", str(row), source.name, rows.line_num)
    except UnicodeDecodeError:
        yield RejectedItem("not UTF-8; the rest of the file is skipped", "", source.name, rows.line_num + 1)
    except (*DAMAGE, csv.Error) as error:
        yield reject_damaged_rest(error, source.name, rows.line_num + 1)


def _csv_lines(stream: io.TextIOWrapper) -> Iterator[str]:
    """Yield the lines of a CSV file.

    Raises:
        csv.Error: at a line of more than `MAX_TEXT_BYTES` characters.
    """
    while line := stream.readline(MAX_TEXT_BYTES):
        if len(line) == MAX_TEXT_BYTES and not line.endswith("\n"):
            raise csv.Error(f"line {explain_too_large(MAX_TEXT_BYTES)}")
        yield line


def _read_text(stream: io.BufferedReader, source: CorpusSource, folder: Path | None) -> DocumentStream:
    raw = b""
    try:
        raw = stream.read(LONG if folder else -1).removeprefix(BOM)
        if folder and len(raw) >= LONG - len(BOM):
            text: str | DiskBackedText = DiskBackedText.from_blocks(
                decode_blocks(chain([raw], iterate_blocks(stream))), folder
            )
        else:
            text = raw.decode()
    except UnicodeDecodeError as error:
        reason = "not UTF-8 text" if source.found else f"not UTF-8 (byte {error.start} of the file)"
        yield RejectedItem(reason, escape_invalid_utf8(raw[:200]), source.name, 1, skipped=source.found)
    except DAMAGE as error:
        yield reject_damaged_rest(error, source.name, 1)
    else:
        if "\0" in text:
            reason = (
                "not UTF-8 text" if source.found else "not text: it has NUL characters, as in binary files and UTF-16"
            )
            yield RejectedItem(reason, "", source.name, 1, skipped=source.found)
        else:
            yield document_from_text(text, "the text", source.name, 1)


def _read_datasets(source: CorpusSource, key: str, whole: bool) -> DocumentStream:
    datasets = import_optional_package("datasets", "reading hf: inputs")
    name = split_hub_dataset_name(source.name)
    try:
        for line, row in enumerate(_load_datasets(datasets, name), 1):
            value = lookup_record_value(row, key)
            if value is ABSENT:
                raise no_column_error(source.name, key, format_key_names(row))
            yield attach_record(document_from_text(value, key, source.name, line), dict(row) if whole else None)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise DataError(
            f"{source.name}: cannot be loaded by the package datasets ({explain_read_error(error)})"
        ) from error


def _load_datasets(datasets: Any, name: HubDatasetName) -> Iterable[dict[str, Any]]:
    folder, split = Path(name.repository), name.split or "train"
    if not name.config and any((folder / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
        loaded: Any = datasets.load_from_disk(name.repository)
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded  # type: ignore[no-any-return]
        if split not in loaded:
            raise DataError(
                f"{HUB}{folder}: no split {split!r}", hint=f"write {HUB}{folder}@SPLIT with one of {', '.join(loaded)}"
            )
        return loaded[split]  # type: ignore[no-any-return]
    return datasets.load_dataset(name.repository, name.config or None, split=split, streaming=True)  # type: ignore[no-any-return]
