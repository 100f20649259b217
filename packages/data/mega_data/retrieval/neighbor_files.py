"""Neighbors of a data set's chunks on disk: a folder, by default `PREFIX.neighbors`.

    neighbors.npy   int64 [chunks, K]: of each chunk of the data set, in the order of the file, the numbers of its neighbours in
                    the database, the nearest first; -1 where there is none
    info.json       `NeighborsInfo`; written last

A chunk is m tokens from the begin of its document, or from the end of the chunk before; the last of a document may be short.
A neighbour is its chunk and the one that follows in its document, 2m tokens.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.bounded_parsing import explain_read_error, read_json_file
from mega_common.errors import DataError
from mega_common.strict_config import StrictConfig
from mega_data.retrieval.document_chunks import DocumentChunks
from mega_data.token_files.indexed_reader import IndexedReader, strip_data_suffix

Ints = npt.NDArray[np.int64]


class ChunksInfo(StrictConfig):
    """Chunks of a data set. `path` is its path at that time; `fingerprint` identifies it.

    Attributes:
        first, last: the chunks [first, last) are meant.
    """

    path: str
    fingerprint: str
    first: int
    last: int


class NeighborsInfo(StrictConfig):
    """Origin of neighbors, and the settings of their search.

    Attributes:
        chunk_length: m.
        neighbors: K.
        encoder: what embedded the chunks.
        index: of faiss, as its factory names it; `probes`: lists of it that were looked at.
        content: xxh3 of neighbors.npy, 32 hex digits.
    """

    version: Literal[1] = 1
    chunk_length: int
    neighbors: int
    data: ChunksInfo
    database: ChunksInfo
    encoder: str
    index: str
    probes: int
    content: str


def get_neighbors_path(prefix: Path) -> Path:
    """Return `PREFIX.neighbors`, the default folder of the neighbors of a data set."""
    prefix = strip_data_suffix(prefix)
    return prefix.with_name(prefix.name + ".neighbors")


def read_neighbors_info(folder: Path) -> NeighborsInfo:
    """Return the description of a folder of neighbors.

    Raises:
        DataError: when it is none.
    """
    path = folder / "info.json"
    if not path.exists():
        hint = f"mega data retrieve PREFIX --encoder FOLDER --output {folder}, started again where it was ended"
        raise DataError(f"{path}: no such file, so no neighbours are there", hint=hint)
    raw: Any = read_json_file(path, DataError)
    if not isinstance(raw, dict):
        raise DataError(f"{path}: does not describe neighbours")
    return NeighborsInfo.parse(raw, source=str(path))


class DatasetNeighbors:
    """Neighbors of a data set's chunks.

    Args:
        cache: as of `Chunks`.

    Attributes:
        info: what they are.
        chunks: those of the data set.

    Raises:
        DataError: when they are not there, or are those of another data set; on the first that is read, when the
            database is not there any more.
    """

    def __init__(self, folder: Path, reader: IndexedReader, cache: Path | None = None) -> None:
        self.folder, self.info, self._cache = folder, read_neighbors_info(folder), cache
        if reader.fingerprint != self.info.data.fingerprint:
            raise DataError(
                f"{folder}: neighbours of another data set ({self.info.data.path}) than {reader.prefix}, or of what it was",
                hint=f"mega data retrieve {reader.prefix} makes its own",
            )
        self.chunks = DocumentChunks(reader, self.info.chunk_length, cache)

    @property
    def fingerprint(self) -> str:
        """Fingerprint (32 hex digits) of everything that is read."""
        info = self.info
        told = (info.chunk_length, info.data.fingerprint, info.database.fingerprint, info.content)
        return xxhash.xxh3_128_hexdigest(repr(told).encode())

    @property
    def is_self_retrieval(self) -> bool:
        """True if data set and database are the same."""
        return self.info.database.fingerprint == self.info.data.fingerprint

    def check_split_disjoint(self, own: range) -> None:
        """Reject a part of the data set, its chunks `own`, if the database overlaps it only partly and would leak other
        splits.

        Raises:
            DataError: when the database is of this data set, and partly in the part and partly not.
        """
        first, last = self.info.database.first, self.info.database.last
        if (
            not self.is_self_retrieval
            or (own.start <= first and last <= own.stop)
            or last <= own.start
            or own.stop <= first
        ):
            return
        raise DataError(
            f"{self.folder}: chunks {first:,} to {last:,} are found as neighbours, and this split of the run has {own.start:,} to "
            f"{own.stop:,}, so that training and validation would see each other",
            hint="mega data retrieve --split with the numbers of the run's data.split",
        )

    def read_neighbor_tokens(self, numbers: Ints) -> Ints:
        """Return the neighbors of chunks `numbers`, int64 [n], as tokens: int64 [n, K, 2m], -1 for missing tokens."""
        return self._database.read_tokens(self._neighbor_numbers[numbers], 2 * self.info.chunk_length)

    @cached_property
    def _neighbor_numbers(self) -> Ints:
        path = self.folder / "neighbors.npy"
        expected = (self.info.data.last, self.info.neighbors)
        try:
            found: Ints = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: cannot be read ({explain_read_error(error)})") from None
        if found.dtype != np.int64 or found.shape != expected:
            raise DataError(f"{path}: {found.dtype} {list(found.shape)}, and info.json says int64 {list(expected)}")
        return found

    @cached_property
    def _database(self) -> DocumentChunks:
        if self.is_self_retrieval:
            return self.chunks
        named = Path(self.info.database.path)
        beside = self.chunks.reader.prefix.parent / named.name
        for prefix in (named, beside):
            if prefix.with_name(prefix.name + ".idx").exists():
                reader = IndexedReader(prefix)
                if reader.fingerprint == self.info.database.fingerprint:
                    return DocumentChunks(reader, self.info.chunk_length, self._cache)
        raise DataError(
            f"{self.folder}: the database of these neighbours, {named}, is not there or was changed",
            hint=f"put it there again, or its files beside the data set as {beside}",
        )


def open_dataset_neighbors(path: Path | None, reader: IndexedReader, cache: Path | None = None) -> DatasetNeighbors:
    """Return the neighbors of a data set, in the folder `path` or in the default folder beside it.

    Raises:
        DataError: as `DatasetNeighbors`.
    """
    return DatasetNeighbors(path or get_neighbors_path(reader.prefix), reader, cache)
