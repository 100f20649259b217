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
from mega_data.sampling.document_order import Ints, find_token_positions
from mega_data.sampling.keyed_permutation import permute_indices
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

BUCKET = 1 << 28  # bytes of tokens that are put in order at a time
MOST = 1024  # buckets; where they do not do, each is larger
CHUNK = 1 << 22  # tokens that are moved at a time

PLACED = np.dtype([("place", "<i8"), ("length", "<i4")])


def shuffle_documents(prefix: Path, output: Path, *, seed: int, overwrite: bool = False) -> DatasetInfo:
    """Write the documents of a data set in an order drawn by (seed, number of documents).

    Reads and writes from begin to end, twice: first each document goes to one of some buckets, files beside the output
    that need the space of the data once more, by the place it is to have; then each bucket is put in order. Memory: a
    bucket (256 MB, or 1/1024 of the data where that is more) and 20 bytes a document.

    Raises:
        DataError: when the data set is damaged, has documents of several sequences or a mask, or the output exists.
    """
    output = strip_data_suffix(Path(output))
    check_output_prefix(output, overwrite)
    reader = IndexedReader(Path(prefix))
    reject_input_as_output(list_dataset_files(output), (get_bin_path(reader.prefix), get_idx_path(reader.prefix)))
    if reader.documents != len(reader) or np.any(np.diff(reader.document_index) != 1):
        raise DataError(
            f"{reader.prefix}: has documents of several sequences, which are not shuffled",
            hint="data.order: shuffled shuffles them as they are read",
        )
    if (kind := read_dataset_kind(reader)) != "text":
        raise DataError(
            f"{reader.prefix}: holds {kind}, which are not shuffled",
            hint="a run draws their order as it packs them",
        )
    size = reader.num_tokens * reader.dtype.itemsize
    buckets = min(MOST, max(1, -(-size // BUCKET)))
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
    """Append each document to its bucket, and its position and length to a file beside it."""
    count, key = len(reader), xxhash.xxh3_64_intdigest(f"shuffle seed={seed}".encode())
    each = max(1, -(-count // buckets))
    for number in range(buckets):
        _get_tokens_path(folder / f"bucket-{number}").touch()
        _get_positions_path(folder / f"bucket-{number}").touch()
    for first, last in iterate_document_ranges(reader.lengths):
        placed = np.empty(last - first, PLACED)
        placed["place"] = permute_indices(np.arange(first, last), count, key)
        placed["length"] = reader.lengths[first:last]
        begins = find_token_positions(reader, np.arange(first, last))
        order = np.argsort(placed["place"], kind="stable")
        owner = placed["place"][order] // each
        cuts = np.searchsorted(owner, np.unique(owner))
        for part in np.split(order, cuts[1:]):
            bucket = folder / f"bucket-{placed['place'][part[0]] // each}"
            part = np.sort(part)  # as they lie in the file
            with open(_get_tokens_path(bucket), "ab") as tokens, open(_get_positions_path(bucket), "ab") as places:
                tokens.write(_gather_tokens(reader.tokens, begins[part], placed["length"][part]).data)
                places.write(placed[part].tobytes())
        bar.advance(int(placed["length"].sum(dtype=np.int64)) * reader.dtype.itemsize)


def _write_bucket(writer: IndexedWriter, bucket: Path, bar: ProgressBar) -> None:
    """Add the documents of a bucket in order of their positions, and remove the bucket."""
    placed = np.fromfile(_get_positions_path(bucket), PLACED)
    path = _get_tokens_path(bucket)
    tokens: Tokens = np.memmap(path, writer.dtype, "r") if path.stat().st_size else np.empty(0, writer.dtype)
    lengths = placed["length"].astype(np.int64)
    begins = np.cumsum(lengths) - lengths
    order = np.argsort(placed["place"])
    begins, lengths = begins[order], lengths[order]
    for first, last in iterate_document_ranges(lengths):
        own = slice(first, last)
        found = _gather_tokens(np.asarray(tokens), begins[own], lengths[own])
        writer.add_documents(found, lengths[own])
        bar.advance(found.nbytes)
    path.unlink()
    _get_positions_path(bucket).unlink()


def iterate_document_ranges(lengths: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield ranges of documents with about `CHUNK` tokens each, or one with more."""
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
    found: Tokens = tokens[np.repeat(begins - (ends - sizes), sizes) + np.arange(total)]
    return found


def _get_tokens_path(bucket: Path) -> Path:
    return bucket.with_suffix(".tokens")


def _get_positions_path(bucket: Path) -> Path:
    return bucket.with_suffix(".places")
