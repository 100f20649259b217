"""Shuffled copy of a data set, with its documents in an order drawn by a seed, for sequential reading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.atomic_files import add_path_to_errors, compute_file_sha256
from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar
from mega_data.sampling.document_order import Ints, find_token_positions, permute_indices
from mega_data.token_files.dataset_info import (
    DatasetInfo,
    SkippedCounts,
    check_output_prefix,
    list_dataset_files,
    read_dataset_info,
    reject_input_as_output,
    remove_dataset_info,
    write_dataset_info,
)
from mega_data.token_files.indexed_reader import IndexedReader, Tokens, get_bin_path, get_idx_path, strip_data_suffix
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.loss_mask import read_dataset_kind

BUCKET = 1 << 28  # bytes of tokens that are sorted at a time
MAX_BUCKETS = 1024  # more data makes larger buckets
CHUNK = 1 << 22  # tokens that are copied at a time

POSITION_DTYPE = np.dtype([("position", "<i8"), ("length", "<i4")])


def shuffle_documents(prefix: Path, output: Path, *, seed: int, overwrite: bool = False) -> DatasetInfo:
    """Write the documents of a data set to another one in a pseudorandom order; return its description.
    The data set at `prefix` is written to `output`. The order is drawn by (seed, number of documents).

    All data is read and written twice, sequentially: documents are first distributed to buckets by their new position
    (files next to the output, as large as the data), then each bucket is sorted. Memory: one bucket (256 MB, or 1/1024
    of the data if that is more) and 20 bytes per document.

    Raises:
        DataError: if the data set is damaged, has documents of several sequences or a mask, or the output exists.
    """
    output = strip_data_suffix(Path(output))
    check_output_prefix(output, overwrite)
    reader = IndexedReader(Path(prefix))
    reject_input_as_output(list_dataset_files(output), (get_bin_path(reader.prefix), get_idx_path(reader.prefix)))
    if reader.documents != len(reader) or np.any(np.diff(reader.document_index) != 1):
        raise DataError(
            f"{reader.prefix}: shuffling documents of several sequences is not supported",
            hint="train with data.order: shuffled, which shuffles them while reading",
        )
    if (kind := read_dataset_kind(reader)) != "text":
        raise DataError(
            f"{reader.prefix}: shuffling a data set of {kind} is not supported",
            hint="use it as it is: training shuffles them when it packs them",
        )
    size = reader.num_tokens * reader.dtype.itemsize
    buckets = min(MAX_BUCKETS, max(1, -(-size // BUCKET)))
    with IndexedWriter(output, reader.dtype) as writer, ProgressBar("shuffling", total=2 * size, unit="bytes") as bar:
        with add_path_to_errors(writer.folder):
            _distribute_documents(reader, writer.folder, buckets, seed, bar)
            for number in range(buckets):
                _write_bucket(writer, writer.folder / f"bucket-{number}", bar)
        remove_dataset_info(output)
    info = read_dataset_info(reader.prefix)
    return write_dataset_info(
        output,
        tokenizer=info and info.tokenizer,
        append_eod=info and info.append_eod,
        dtype=reader.dtype.newbyteorder("=").name,
        documents=reader.documents,
        tokens=reader.num_tokens,
        text_bytes=info.text_bytes if info else 0,
        skipped=info.skipped if info else SkippedCounts(),
        bin_sha256=compute_file_sha256(get_bin_path(output)),
        license=info.license if info else None,
    )


def _distribute_documents(reader: IndexedReader, folder: Path, buckets: int, seed: int, bar: ProgressBar) -> None:
    """Append each document to its bucket, and its new position and length to the bucket's second file."""
    count, key = len(reader), xxhash.xxh3_64_intdigest(f"shuffle seed={seed}".encode())
    each = max(1, -(-count // buckets))
    for number in range(buckets):
        _get_tokens_path(folder / f"bucket-{number}").touch()
        _get_positions_path(folder / f"bucket-{number}").touch()
    for first, last in iterate_document_ranges(reader.lengths):
        documents = np.empty(last - first, POSITION_DTYPE)
        documents["position"] = permute_indices(np.arange(first, last), count, key)
        documents["length"] = reader.lengths[first:last]
        begins = find_token_positions(reader, np.arange(first, last))
        order = np.argsort(documents["position"], kind="stable")
        owner = documents["position"][order] // each
        cuts = np.searchsorted(owner, np.unique(owner))
        for part in np.split(order, cuts[1:]):
            bucket = folder / f"bucket-{documents['position'][part[0]] // each}"
            part = np.sort(part)  # file order
            with open(_get_tokens_path(bucket), "ab") as tokens, open(_get_positions_path(bucket), "ab") as positions:
                tokens.write(_gather_tokens(reader.tokens, begins[part], documents["length"][part]).data)
                positions.write(documents[part].tobytes())
        bar.advance(int(documents["length"].sum(dtype=np.int64)) * reader.dtype.itemsize)


def _write_bucket(writer: IndexedWriter, bucket: Path, bar: ProgressBar) -> None:
    """Add the documents of a bucket in order of their positions, and remove the bucket."""
    documents = np.fromfile(_get_positions_path(bucket), POSITION_DTYPE)
    path = _get_tokens_path(bucket)
    tokens: Tokens = np.memmap(path, writer.dtype, "r") if path.stat().st_size else np.empty(0, writer.dtype)
    lengths = documents["length"].astype(np.int64)
    begins = np.cumsum(lengths) - lengths
    order = np.argsort(documents["position"])
    begins, lengths = begins[order], lengths[order]
    for first, last in iterate_document_ranges(lengths):
        part = slice(first, last)
        gathered = _gather_tokens(np.asarray(tokens), begins[part], lengths[part])
        writer.add_documents(gathered, lengths[part])
        bar.advance(gathered.nbytes)
    path.unlink()
    _get_positions_path(bucket).unlink()


def iterate_document_ranges(lengths: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges (first, last) of documents of at most `CHUNK` (4 Mi) tokens together, or of one longer one."""
    ends = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < ends.size:
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + CHUNK, "right")))
        yield first, last
        first = last


def _gather_tokens(tokens: Tokens, begins: Ints, lengths: npt.NDArray[Any]) -> Tokens:
    """Return the tokens of documents, concatenated."""
    sizes = lengths.astype(np.int64)
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if ends.size else 0
    gathered: Tokens = tokens[np.repeat(begins - (ends - sizes), sizes) + np.arange(total)]
    return gathered


def _get_tokens_path(bucket: Path) -> Path:
    return bucket.with_suffix(".tokens")


def _get_positions_path(bucket: Path) -> Path:
    return bucket.with_suffix(".positions")
