"""A data set with its documents in an order drawn by a seed: written once, to be read from begin to end ever after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_common.files import naming, sha256_file
from mega_common.log import ProgressBar
from mega_data.files.indexed import IndexedReader, Tokens, bin_path, data_prefix, idx_path
from mega_data.files.indexed_writer import IndexedWriter
from mega_data.files.info import (
    DataInfo,
    Skipped,
    data_files,
    forget,
    prepare_output,
    read_info,
    refuse_inputs,
    write_info,
)
from mega_data.files.mask import kind_of
from mega_data.order.document_order import Ints, token_positions
from mega_data.order.permutation import permuted_many

BUCKET = 1 << 28  # bytes of tokens that are put in order at a time
MOST = 1024  # buckets; where they do not do, each is larger
CHUNK = 1 << 22  # tokens that are moved at a time

PLACED = np.dtype([("place", "<i8"), ("length", "<i4")])


def shuffle(prefix: Path, output: Path, *, seed: int, overwrite: bool = False) -> DataInfo:
    """Write the documents of a data set in an order drawn by (seed, number of documents).

    Reads and writes from begin to end, twice: first each document goes to one of some buckets, files beside the output
    that need the space of the data once more, by the place it is to have; then each bucket is put in order. Memory: a
    bucket (256 MB, or 1/1024 of the data where that is more) and 20 bytes a document.

    Raises:
        DataError: when the data set is damaged, has documents of several sequences or a mask, or the output exists.
    """
    output = data_prefix(Path(output))
    prepare_output(output, overwrite)
    reader = IndexedReader(Path(prefix))
    refuse_inputs(data_files(output), (bin_path(reader.prefix), idx_path(reader.prefix)))
    if reader.documents != len(reader) or np.any(np.diff(reader.document_index) != 1):
        raise DataError(
            f"{reader.prefix}: has documents of several sequences, which are not shuffled",
            hint="data.order: shuffled shuffles them as they are read",
        )
    if (kind := kind_of(reader)) != "text":
        raise DataError(
            f"{reader.prefix}: holds {kind}, which are not shuffled",
            hint="a run draws their order as it packs them",
        )
    size = reader.num_tokens * reader.dtype.itemsize
    buckets = min(MOST, max(1, -(-size // BUCKET)))
    with IndexedWriter(output, reader.dtype) as writer, ProgressBar("shuffling", total=2 * size, unit="bytes") as bar:
        with naming(writer.folder):
            _distribute(reader, writer.folder, buckets, seed, bar)
            for number in range(buckets):
                _put_in_order(writer, writer.folder / f"bucket-{number}", bar)
        forget(output)
    info = read_info(reader.prefix)
    return write_info(
        output,
        tokenizer=info and info.tokenizer,
        append_eod=info and info.append_eod,
        dtype=reader.dtype.newbyteorder("=").name,
        documents=reader.documents,
        tokens=reader.num_tokens,
        text_bytes=info.text_bytes if info else 0,
        skipped=info.skipped if info else Skipped(),
        bin_sha256=sha256_file(bin_path(output)),
        license=info.license if info else None,
    )


def _distribute(reader: IndexedReader, folder: Path, buckets: int, seed: int, bar: ProgressBar) -> None:
    """Append each document to its bucket, and its place and length to a file beside that."""
    count, key = len(reader), xxhash.xxh3_64_intdigest(f"shuffle seed={seed}".encode())
    each = max(1, -(-count // buckets))
    for number in range(buckets):
        _tokens_of(folder / f"bucket-{number}").touch()
        _places_of(folder / f"bucket-{number}").touch()
    for first, last in chunks(reader.lengths):
        placed = np.empty(last - first, PLACED)
        placed["place"] = permuted_many(np.arange(first, last), count, key)
        placed["length"] = reader.lengths[first:last]
        begins = token_positions(reader, np.arange(first, last))
        order = np.argsort(placed["place"], kind="stable")
        owner = placed["place"][order] // each
        cuts = np.searchsorted(owner, np.unique(owner))
        for part in np.split(order, cuts[1:]):
            bucket = folder / f"bucket-{placed['place'][part[0]] // each}"
            part = np.sort(part)  # as they lie in the file
            with open(_tokens_of(bucket), "ab") as tokens, open(_places_of(bucket), "ab") as places:
                tokens.write(_gathered(reader.tokens, begins[part], placed["length"][part]).data)
                places.write(placed[part].tobytes())
        bar.advance(int(placed["length"].sum(dtype=np.int64)) * reader.dtype.itemsize)


def _put_in_order(writer: IndexedWriter, bucket: Path, bar: ProgressBar) -> None:
    """Add a bucket's documents by their places, and remove it."""
    placed = np.fromfile(_places_of(bucket), PLACED)
    path = _tokens_of(bucket)
    tokens: Tokens = np.memmap(path, writer.dtype, "r") if path.stat().st_size else np.empty(0, writer.dtype)
    lengths = placed["length"].astype(np.int64)
    begins = np.cumsum(lengths) - lengths
    order = np.argsort(placed["place"])
    begins, lengths = begins[order], lengths[order]
    for first, last in chunks(lengths):
        own = slice(first, last)
        found = _gathered(np.asarray(tokens), begins[own], lengths[own])
        writer.add_documents(found, lengths[own])
        bar.advance(found.nbytes)
    path.unlink()
    _places_of(bucket).unlink()


def chunks(lengths: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Ranges of documents with about `CHUNK` tokens each, or one with more."""
    ends = np.cumsum(lengths, dtype=np.int64)
    first = 0
    while first < ends.size:
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + CHUNK, "right")))
        yield first, last
        first = last


def _gathered(tokens: Tokens, begins: Ints, lengths: npt.NDArray[Any]) -> Tokens:
    """The tokens of documents, one after another."""
    sizes = lengths.astype(np.int64)
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if ends.size else 0
    found: Tokens = tokens[np.repeat(begins - (ends - sizes), sizes) + np.arange(total)]
    return found


def _tokens_of(bucket: Path) -> Path:
    return bucket.with_suffix(".tokens")


def _places_of(bucket: Path) -> Path:
    return bucket.with_suffix(".places")
