"""Neighbors of a data set's chunks on disk: a folder, by default `PREFIX.neighbors`.

    neighbors.npy   int64 [chunks, K]: for each chunk of the data set, in file order, the chunk numbers of its neighbors in
                    the database, the nearest first; -1 for a missing neighbor
    info.json       `NeighborsInfo`; written last

A chunk is m tokens from the begin of its document, or from the end of the previous chunk; the last one of a document may
be short. A neighbor is a chunk and its continuation in the document, 2m tokens.
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
    """Description of the chunks of a data set, in the file `info.json` of a folder of retrieved neighbors.
    It has the data set's path at that time, the fingerprint that identifies it, and the chunk range.

    Attributes:
        first, last: range [first, last) of the chunks.
    """

    path: str
    fingerprint: str
    first: int
    last: int


class NeighborsInfo(StrictConfig):
    """Description of a folder of retrieved neighbors (`info.json`): data set, database, and the settings of the search.

    Attributes:
        chunk_length: m.
        neighbors: K.
        encoder: name of the model that embedded the chunks.
        index: faiss index factory string.
        probes: number of index lists that were probed.
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
    """Return `PREFIX.neighbors`, the default folder of the retrieved neighbors of a data set."""
    prefix = strip_data_suffix(prefix)
    return prefix.with_name(prefix.name + ".neighbors")


def read_neighbors_info(folder: Path) -> NeighborsInfo:
    """Return the description of a folder of retrieved neighbors, from its `info.json`.

    Raises:
        DataError: if it is missing or has another format.
    """
    path = folder / "info.json"
    if not path.exists():
        hint = (
            f"run mega data retrieve PREFIX --encoder FOLDER --output {folder}, which also resumes an interrupted run"
        )
        raise DataError(f"{path}: the neighbors are missing or incomplete", hint=hint)
    raw: Any = read_json_file(path, DataError)
    if not isinstance(raw, dict):
        raise DataError(f"{path}: is not a description of neighbors (JSON object expected)")
    return NeighborsInfo.parse(raw, source=str(path))


class DatasetNeighbors:
    """Retrieved neighbors of each chunk of a data set, read from a folder that `retrieve_neighbors` wrote.

    Args:
        cache: see `DocumentChunks`.

    Attributes:
        info: description of the neighbors.
        chunks: chunks of the data set.

    Raises:
        DataError: if they are missing, or belong to another data set; on the first read, if the database is missing.
    """

    def __init__(self, folder: Path, reader: IndexedReader, cache: Path | None = None) -> None:
        self.folder, self.info, self._cache = folder, read_neighbors_info(folder), cache
        if reader.fingerprint != self.info.data.fingerprint:
            raise DataError(
                f"{folder}: has the neighbors of another data set ({self.info.data.path}) than {reader.prefix}, or of an"
                " earlier version of it",
                hint=f"run mega data retrieve {reader.prefix}",
            )
        self.chunks = DocumentChunks(reader, self.info.chunk_length, cache)

    @property
    def fingerprint(self) -> str:
        """Fingerprint (32 hex digits) of the data set, the database and the neighbor numbers."""
        info = self.info
        content = (info.chunk_length, info.data.fingerprint, info.database.fingerprint, info.content)
        return xxhash.xxh3_128_hexdigest(repr(content).encode())

    @property
    def is_self_retrieval(self) -> bool:
        """True if neighbors were searched in the data set itself."""
        return self.info.database.fingerprint == self.info.data.fingerprint

    def check_split_overlap(self, split: range) -> None:
        """Raise DataError if the range `split` of chunks neither contains nor avoids the chunks that were searched for neighbors.

        Text would then leak between training and validation. A database that is another data set is always accepted.
        """
        first, last = self.info.database.first, self.info.database.last
        contains = split.start <= first and last <= split.stop
        disjoint = last <= split.start or split.stop <= first
        if not self.is_self_retrieval or contains or disjoint:
            return
        raise DataError(
            f"{self.folder}: neighbors are taken from chunks {first:,} to {last:,}, which overlap this split of the run"
            f" ({split.start:,} to {split.stop:,}) only partly, so text would leak between training and validation",
            hint="run mega data retrieve with --split equal to data.split",
        )

    def read_neighbor_tokens(self, numbers: Ints) -> Ints:
        """Return the tokens of the chunks' retrieved neighbors, int64 [n, neighbors, 2 * chunk length], -1 where missing."""
        return self._database.read_tokens(self._neighbor_numbers[numbers], 2 * self.info.chunk_length)

    @cached_property
    def _neighbor_numbers(self) -> Ints:
        path = self.folder / "neighbors.npy"
        expected = (self.info.data.last, self.info.neighbors)
        try:
            numbers: Ints = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: cannot be read ({explain_read_error(error)})") from None
        if numbers.dtype != np.int64 or numbers.shape != expected:
            raise DataError(
                f"{path}: must be int64 {list(expected)} as in info.json, not {numbers.dtype} {list(numbers.shape)}",
                hint="run mega data retrieve again with --overwrite",
            )
        return numbers

    @cached_property
    def _database(self) -> DocumentChunks:
        if self.is_self_retrieval:
            return self.chunks
        original = Path(self.info.database.path)
        local = self.chunks.reader.prefix.parent / original.name
        for prefix in (original, local):
            if prefix.with_name(prefix.name + ".idx").exists():
                reader = IndexedReader(prefix)
                if reader.fingerprint == self.info.database.fingerprint:
                    return DocumentChunks(reader, self.info.chunk_length, self._cache)
        raise DataError(
            f"{self.folder}: the database of these neighbors, {original}, is missing or was changed",
            hint=f"restore it, or copy its files to {local}",
        )


def open_dataset_neighbors(path: Path | None, reader: IndexedReader, cache: Path | None = None) -> DatasetNeighbors:
    """Return the retrieved neighbors of the data set of `reader`, from the folder `path` (default: `PREFIX.neighbors`).

    Raises:
        DataError: as `DatasetNeighbors`.
    """
    return DatasetNeighbors(path or get_neighbors_path(reader.prefix), reader, cache)
