"""Retrieval of neighbors of all chunks of a data set: embed chunks, build an index, search; an interrupted run can be
resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.atomic_files import open_atomic_file, write_json_atomically
from mega_common.errors import ConfigError, DataError
from mega_common.progress_logging import ProgressBar, logger
from mega_data.preprocessing.partial_folder import (
    get_partial_folder,
    lock_partial_folder,
    remove_partial_folder,
    translate_write_errors,
)
from mega_data.retrieval.document_chunks import DocumentChunks
from mega_data.retrieval.label_leaks import LabelLeakFilter
from mega_data.retrieval.neighbor_files import ChunksInfo, NeighborsInfo
from mega_data.retrieval.vector_index import NearestVectors, VectorShards, select_index_type
from mega_data.sampling.dataset_parts import compute_split_bounds
from mega_data.token_files.dataset_info import read_dataset_info
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.tokenizer import Tokenizer

EmbedTexts: TypeAlias = Callable[[list[str], Callable[[int], None]], npt.NDArray[np.float32]]
"""Makes fp32 [n, D] of n texts, and tells of those that are done."""


@dataclass(frozen=True)
class ChunkEncoder:
    """Encoder that embeds chunks: its name, its identity with version, and its function."""

    name: str
    identity: str
    embed: EmbedTexts


@dataclass(frozen=True)
class RetrievalSettings:
    """Settings of the neighbor search.

    Attributes:
        index: for faiss's index factory; None: by the number of vectors.
        probes: lists of an index that are looked at for each chunk.
        split: of the run: shares of train, valid and test. What is in train's share of the database is found.
    """

    chunk_length: int = 64
    neighbors: int = 2
    index: str | None = None
    probes: int = 32
    split: tuple[float, ...] = (1.0,)


def retrieve_neighbors(
    data: Path,
    database: Path | None,
    output: Path,
    tokenizer: Tokenizer,
    encoder: ChunkEncoder,
    search: RetrievalSettings,
    *,
    overwrite: bool,
) -> NeighborsInfo:
    """Find the neighbors of each chunk of `data` in `database`, by default itself, and write them to the folder
    `output`.

    Vectors and what was found are kept in `.OUTPUT.partial`, by files, until all is there.

    Raises:
        DataError: when the output exists, a data set cannot be used, or they are of different tokenizers.
        ConfigError: when the index cannot be built, or the split gives nothing to train.
        MissingPackageError: without faiss.
    """
    if (output / "info.json").exists() and not overwrite:
        raise DataError(f"{output}: exists already", hint="choose another --output, or say --overwrite")
    chunks = DocumentChunks(IndexedReader(data), search.chunk_length)
    found_in = chunks if database is None else DocumentChunks(IndexedReader(database), search.chunk_length)
    if found_in.reader.fingerprint == chunks.reader.fingerprint:
        found_in = chunks
    _check_tokenizers(chunks.reader, found_in.reader)
    own = _select_train_chunks(found_in, search.split)
    folder = get_partial_folder(output)
    with translate_write_errors(output):
        lock = lock_partial_folder(folder, wait=False)
        if lock is None:
            raise DataError(f"{output}: another process makes it", hint="wait for its end, or choose another --output")
        try:
            made = _RetrievalRun(chunks, found_in, own, folder, encoder, search)
            made.embed_chunks(tokenizer)
            index, found = made.search_neighbors()
            info = _write_neighbors(output, made, index, found)
            remove_partial_folder(folder)
        finally:
            os.close(lock)
    return info


def _check_tokenizers(one: IndexedReader, other: IndexedReader) -> None:
    made = [info.tokenizer for reader in (one, other) if (info := read_dataset_info(reader.prefix)) and info.tokenizer]
    if len({tokenizer.fingerprint for tokenizer in made}) > 1:
        raise DataError(
            f"{other.prefix}: made with another tokenizer than {one.prefix}, whose model is to read it",
            hint="preprocess both with one tokenizer",
        )


def _select_train_chunks(chunks: DocumentChunks, split: tuple[float, ...]) -> range:
    """Return the chunks of the training split, as `sampling.dataset_parts` cuts a data set of kind retro."""
    bound = compute_split_bounds(split)[0]
    if bound is None:
        raise ConfigError(f"--split {split}: gives nothing to train")
    last = round(bound[1] * float(chunks.reader.documents))
    own = range(int(chunks.starts[last]))
    if not own:
        raise DataError(f"{chunks.reader.prefix}: has no token in its first {last} documents, which train would read")
    return own


class _RetrievalRun:
    """Vectors and neighbors of a run in progress, in the files of a locked folder."""

    def __init__(
        self,
        chunks: DocumentChunks,
        found_in: DocumentChunks,
        own: range,
        folder: Path,
        encoder: ChunkEncoder,
        search: RetrievalSettings,
    ) -> None:
        self.chunks, self.found_in, self.own, self.encoder, self.search_for = chunks, found_in, own, encoder, search
        self._same = chunks is found_in
        of = [search.chunk_length, encoder.identity, chunks.reader.fingerprint, found_in.reader.fingerprint]
        of += [] if self._same else [own.stop]
        _discard_stale_files(folder, of, [search.neighbors, search.index, search.probes, own.stop])
        self._queries = VectorShards(folder, "data", len(chunks))
        self._keys = self._queries if self._same else VectorShards(folder, "database", own.stop)
        self._found = VectorShards(folder, "found", len(chunks))

    def embed_chunks(self, tokenizer: Tokenizer) -> None:
        """Compute the missing vectors."""
        todo = [(self.chunks, self._queries)] + ([] if self._same else [(self.found_in, self._keys)])
        missing = [(chunks, rows, span) for chunks, rows in todo for span in rows.iterate_missing()]
        with ProgressBar("embedding", total=sum(len(span) for *_, span in missing), unit="chunks") as bar:
            for chunks, rows, span in missing:
                tokens = chunks.read_tokens(np.asarray(span), chunks.length)
                texts = [tokenizer.decode(row[row >= 0].tolist(), skip_special_tokens=True) for row in tokens]
                rows.write_shard(span.start, self.encoder.embed(texts, bar.advance))

    def search_neighbors(self) -> tuple[str, VectorShards]:
        """Find the missing neighbors, and return the index type and the neighbors."""
        width = next(self._keys.iterate_blocks(0, 1)).shape[1]
        named = self.search_for.index or select_index_type(len(self.own), width)
        missing = list(self._found.iterate_missing())
        if not missing:
            return named, self._found
        index = NearestVectors(self._keys, self.own.stop, factory=named, probes=self.search_for.probes)
        copies = LabelLeakFilter(self.chunks, self.found_in)
        with ProgressBar("searching", total=sum(map(len, missing)), unit="chunks") as bar:
            for span in missing:
                vectors = np.concatenate(list(self._queries.iterate_blocks(span.start, span.stop)))

                def allowed(rows: Any, found: Any, first: int = span.start) -> Any:
                    return copies.select_allowed(first + rows, found)

                self._found.write_shard(span.start, index.search_nearest(vectors, self.search_for.neighbors, allowed))
                bar.advance(len(span))
        return named, self._found


def _discard_stale_files(folder: Path, of: list[Any], how: list[Any]) -> None:
    """Delete the vectors and neighbors of an earlier run that had other inputs or settings."""
    digests = {
        name: hashlib.sha256(repr(told).encode()).hexdigest() for name, told in (("vectors", of), ("found", [of, how]))
    }
    settings = folder / "settings.json"
    known = json.loads(settings.read_text()) if settings.exists() else {}
    for path in folder.glob("*.npy"):
        what = "found" if path.name.startswith("found-") else "vectors"
        if known.get(what) != digests[what]:
            path.unlink()
    write_json_atomically(settings, digests)


def _write_neighbors(output: Path, made: _RetrievalRun, index: str, found: VectorShards) -> NeighborsInfo:
    """Write the neighbors; `info.json` is written last and marks them complete."""
    (output / "info.json").unlink(missing_ok=True)
    with open_atomic_file(output / "neighbors.npy") as stream:
        content = _write_rows(stream, found, made.search_for.neighbors)
    info = NeighborsInfo(
        chunk_length=made.search_for.chunk_length,
        neighbors=made.search_for.neighbors,
        data=_describe_chunks(made.chunks, range(len(made.chunks))),
        database=_describe_chunks(made.found_in, made.own),
        encoder=made.encoder.name,
        index=index,
        probes=made.search_for.probes,
        content=content,
    )
    write_json_atomically(output / "info.json", info.model_dump())
    none = sum(int((block[:, 0] < 0).sum()) for block in found.iterate_blocks(0, len(found)))
    logger.info("%s: neighbours of %d chunks in %d, %d have none", output, len(found), len(made.own), none)
    return info


def _write_rows(stream: IO[bytes], found: VectorShards, neighbors: int) -> str:
    header = {"descr": "<i8", "fortran_order": False, "shape": (len(found), neighbors)}
    np.lib.format.write_array_header_1_0(stream, header)
    digest = xxhash.xxh3_128()
    for block in found.iterate_blocks(0, len(found)):
        digest.update(np.ascontiguousarray(block).data)
        stream.write(np.ascontiguousarray(block).data)
    return digest.hexdigest()


def _describe_chunks(chunks: DocumentChunks, own: range) -> ChunksInfo:
    reader = chunks.reader
    return ChunksInfo(path=str(reader.prefix.resolve()), fingerprint=reader.fingerprint, first=own.start, last=own.stop)
