"""Nearest-neighbor search by faiss, and sharded storage of vectors."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.atomic_files import open_atomic_file, write_json_atomically
from mega_common.errors import ConfigError, DataError, MissingPackageError
from mega_common.progress_logging import ProgressBar, logger
from mega_data.retrieval.document_chunks import DocumentChunks, NeighborLeakFilter
from mega_data.retrieval.neighbor_files import ChunksInfo, NeighborsInfo
from mega_data.sampling.dataset_parts import compute_split_bounds
from mega_data.token_files.dataset_info import read_dataset_info
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.partial_folder import (
    convert_write_errors_to_data_error,
    get_partial_folder,
    lock_partial_folder,
    remove_partial_folder,
)
from mega_data.tokenizer import Tokenizer

SHARD = 1 << 14  # rows of a file


class VectorShards:
    """Array of `rows` rows stored in the files FOLDER/NAME-00000.npy and so on, some of which may be missing.

    Args:
        shard: rows of a file; the last file may have fewer.
    """

    def __init__(self, folder: Path, name: str, rows: int, shard: int = SHARD) -> None:
        self._folder, self._name, self._shard, self.rows = folder, name, shard, rows

    def __len__(self) -> int:
        return self.rows

    def iterate_missing_ranges(self) -> Iterator[range]:
        """Yield the row range of each `.npy` file that does not exist yet."""
        for first in range(0, self.rows, self._shard):
            if not self._get_path(first).exists():
                yield range(first, min(first + self._shard, self.rows))

    def write_shard(self, first: int, values: npt.NDArray[Any]) -> None:
        """Write `values` as the `.npy` file whose first row is `first`, atomically."""
        with open_atomic_file(self._get_path(first)) as stream:
            np.save(stream, values)

    def iterate_blocks(self, first: int, last: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the rows [first, last), one file at a time, as memory maps; all these files must exist."""
        for begin in range(first - first % self._shard, last, self._shard):
            found = np.load(self._get_path(begin), mmap_mode="r")
            yield found[max(0, first - begin) : last - begin]

    def sample_rows(self, first: int, last: int, step: int) -> npt.NDArray[Any]:
        """Return about every `step`-th row of [first, last) as one array."""
        return np.concatenate([block[::step] for block in self.iterate_blocks(first, last)])

    def _get_path(self, first: int) -> Path:
        return self._folder / f"{self._name}-{first // self._shard:05}.npy"


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
MAX_FLAT = 1 << 18  # vectors; up to this number all distances are computed
MAX_UNCOMPRESSED = 1 << 21  # vectors; more are compressed by product quantisation
TRAINING_VECTORS = 1 << 19
MAX_LISTS = 1 << 13
PAIRS = 1 << 18  # candidate distances in memory at a time


def select_index_type(vectors: int, width: int) -> str:
    """Return the faiss `index_factory` string for `vectors` vectors of `width` values.
    The index is Flat (exact), IVF lists, or for many vectors IVF lists with at most 64 bytes per vector.
    """
    if vectors <= MAX_FLAT:
        return "Flat"
    lists = min(MAX_LISTS, 1 << round(math.log2(math.sqrt(vectors))))
    return f"IVF{lists},Flat" if vectors <= MAX_UNCOMPRESSED else f"IVF{lists},PQ{math.gcd(width, 64)}"


class NearestNeighborIndex:
    """Faiss index of the first `count` rows of `vectors` that finds nearest neighbors by Euclidean distance.

    Args:
        factory: faiss index factory string.
        probes: number of lists of an IVF index that are probed for each vector.

    Raises:
        MissingPackageError: if faiss is not installed.
        ConfigError: if faiss cannot build the index.
    """

    def __init__(self, vectors: VectorShards, count: int, *, factory: str, probes: int) -> None:
        try:
            import faiss
        except ImportError:
            raise MissingPackageError(
                "mega data retrieve requires the package faiss", hint="pip install 'mega-data[retro]'"
            ) from None
        width, self._count = next(vectors.iterate_blocks(0, count)).shape[1], count
        try:
            self._index: Any = faiss.index_factory(width, factory)
            if not self._index.is_trained:
                step = max(1, count // TRAINING_VECTORS)
                self._index.train(np.ascontiguousarray(vectors.sample_rows(0, count, step)))
            with ProgressBar("indexing", total=count, unit="chunks") as bar:
                for block in vectors.iterate_blocks(0, count):
                    self._index.add(np.ascontiguousarray(block))
                    bar.advance(len(block))
            lists = faiss.try_extract_index_ivf(self._index)
            if lists is not None:
                lists.nprobe = min(probes, lists.nlist)
        except RuntimeError as error:
            reason = str(error).rsplit(": ", 1)[-1]
            raise ConfigError(
                f"--index {factory}: faiss cannot build it for {count:,} vectors of {width} numbers ({reason})",
                hint="use Flat, which is always possible, or another string of faiss's index factory",
            ) from None

    def search_nearest(
        self, vectors: Floats, count: int, allowed: Callable[[Ints, Ints], npt.NDArray[np.bool_]]
    ) -> Ints:
        """Return the rows of the `count` nearest allowed vectors for each of n query vectors, nearest first, -1 if fewer.
        The result is int64 [n, count].

        Args:
            vectors: fp32 [n, D].
            allowed: function of vector numbers, int64 [m], and rows, int64 [m, c] with -1 for none, that returns which
                rows are allowed: bool [m, c].
        """
        nearest = np.full((len(vectors), count), -1, np.int64)
        todo, width = np.arange(len(vectors)), min(4 * count, self._count)
        while todo.size:
            short = []
            for start in range(0, todo.size, step := max(1, PAIRS // width)):
                batch = todo[start : start + step]
                rows = self._index.search(np.ascontiguousarray(vectors[batch]), width)[1]
                good = allowed(batch, rows)
                first = np.argsort(~good, axis=1, kind="stable")[:, :count]
                chosen = np.where(np.take_along_axis(good, first, 1), np.take_along_axis(rows, first, 1), -1)
                nearest[batch, : chosen.shape[1]] = chosen
                short.append(batch[(good.sum(1) < count) & (rows[:, -1] >= 0)])
            if width == self._count:
                break
            todo, width = np.concatenate(short), min(4 * width, self._count)
        return nearest


EmbedTexts: TypeAlias = Callable[[list[str], Callable[[int], None]], npt.NDArray[np.float32]]
"""Embedding of n texts to fp32 [n, D]; the second argument is called with the number of finished texts."""


@dataclass(frozen=True)
class ChunkEncoder:
    """Encoder that embeds the texts of chunks as vectors.
    It has a name, an identity with version, and the function that embeds.
    """

    name: str
    identity: str
    embed: EmbedTexts


@dataclass(frozen=True)
class RetrievalSettings:
    """Settings of a nearest-neighbor search for retrieval.
    They are the chunk length, the number of neighbors, the faiss index, and the share of the database to search.

    Attributes:
        index: faiss index factory string; None selects it by the number of vectors.
        probes: number of index lists that are probed for each chunk.
        split: shares of train, valid and test of the run; neighbors come from the train share of the database.
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
    """Find the nearest neighbors of each chunk of `data` in `database`, and write their numbers to the folder `output`.

    The default database is `data` itself. Vectors and results are stored in `.OUTPUT.partial` until all are complete.

    Raises:
        DataError: if the output exists, a data set cannot be used, or the tokenizers differ.
        ConfigError: if the index cannot be built, or the train share of the split is zero.
        MissingPackageError: if faiss is not installed.
    """
    if (output / "info.json").exists() and not overwrite:
        raise DataError(f"{output}: exists already", hint="choose another --output, or pass --overwrite")
    chunks = DocumentChunks(IndexedReader(data), search.chunk_length)
    searched = chunks if database is None else DocumentChunks(IndexedReader(database), search.chunk_length)
    if searched.reader.fingerprint == chunks.reader.fingerprint:
        searched = chunks
    _check_tokenizers(chunks.reader, searched.reader)
    train = _select_train_chunks(searched, search.split)
    folder = get_partial_folder(output)
    with convert_write_errors_to_data_error(output):
        lock = lock_partial_folder(folder, wait=False)
        if lock is None:
            raise DataError(
                f"{output}: another process is writing it", hint="wait until it ends, or choose another --output"
            )
        try:
            run = _RetrievalRun(chunks, searched, train, folder, encoder, search)
            run.embed_chunks(tokenizer)
            index, found = run.search_neighbors()
            info = _write_neighbors(output, run, index, found)
            remove_partial_folder(folder)
        finally:
            os.close(lock)
    return info


def _check_tokenizers(data: IndexedReader, database: IndexedReader) -> None:
    infos = [read_dataset_info(reader.prefix) for reader in (data, database)]
    if len({info.tokenizer.fingerprint for info in infos if info and info.tokenizer}) > 1:
        raise DataError(
            f"{database.prefix}: has another tokenizer than {data.prefix}",
            hint="preprocess both with the same tokenizer",
        )


def _select_train_chunks(chunks: DocumentChunks, split: tuple[float, ...]) -> range:
    """Return the chunks of the training split, divided as by `DatasetPartitioner` for kind retro."""
    bound = compute_split_bounds(split)[0]
    if bound is None:
        raise ConfigError(f"--split {split}: the share of train must be above 0", hint="use the value of data.split")
    last = round(bound[1] * float(chunks.reader.documents))
    train = range(int(chunks.starts[last]))
    if not train:
        raise DataError(f"{chunks.reader.prefix}: has no training tokens (in its first {last} documents)")
    return train


class _RetrievalRun:
    """Vectors and neighbors of a run in progress, in the files of a locked folder."""

    def __init__(
        self,
        chunks: DocumentChunks,
        database: DocumentChunks,
        train: range,
        folder: Path,
        encoder: ChunkEncoder,
        search: RetrievalSettings,
    ) -> None:
        self.chunks, self.database, self.train, self.encoder, self.search = chunks, database, train, encoder, search
        self._same = chunks is database
        inputs = [search.chunk_length, encoder.identity, chunks.reader.fingerprint, database.reader.fingerprint]
        inputs += [] if self._same else [train.stop]
        _discard_stale_files(folder, inputs, [search.neighbors, search.index, search.probes, train.stop])
        self._queries = VectorShards(folder, "data", len(chunks))
        self._keys = self._queries if self._same else VectorShards(folder, "database", train.stop)
        self._found = VectorShards(folder, "found", len(chunks))

    def embed_chunks(self, tokenizer: Tokenizer) -> None:
        """Compute the embedding vectors of chunks that are missing on disk."""
        todo = [(self.chunks, self._queries)] + ([] if self._same else [(self.database, self._keys)])
        missing = [(chunks, rows, span) for chunks, rows in todo for span in rows.iterate_missing_ranges()]
        with ProgressBar("embedding", total=sum(len(span) for *_, span in missing), unit="chunks") as bar:
            for chunks, rows, span in missing:
                tokens = chunks.read_tokens(np.asarray(span), chunks.length)
                texts = [tokenizer.decode(row[row >= 0].tolist(), skip_special_tokens=True) for row in tokens]
                rows.write_shard(span.start, self.encoder.embed(texts, bar.advance))

    def search_neighbors(self) -> tuple[str, VectorShards]:
        """Find the nearest neighbors of chunks that are missing on disk.
        Returns the index type and the neighbors.
        """
        width = next(self._keys.iterate_blocks(0, 1)).shape[1]
        factory = self.search.index or select_index_type(len(self.train), width)
        missing = list(self._found.iterate_missing_ranges())
        if not missing:
            return factory, self._found
        index = NearestNeighborIndex(self._keys, self.train.stop, factory=factory, probes=self.search.probes)
        leak_filter = NeighborLeakFilter(self.chunks, self.database)
        with ProgressBar("searching", total=sum(map(len, missing)), unit="chunks") as bar:
            for span in missing:
                vectors = np.concatenate(list(self._queries.iterate_blocks(span.start, span.stop)))

                def allowed(rows: Any, found: Any, first: int = span.start) -> Any:
                    return leak_filter.mask_allowed_candidates(first + rows, found)

                self._found.write_shard(span.start, index.search_nearest(vectors, self.search.neighbors, allowed))
                bar.advance(len(span))
        return factory, self._found


def _discard_stale_files(folder: Path, inputs: list[Any], search: list[Any]) -> None:
    """Delete the vectors and neighbors of an earlier run that had other inputs or settings."""
    digests = {
        name: hashlib.sha256(repr(values).encode()).hexdigest()
        for name, values in (("vectors", inputs), ("found", [inputs, search]))
    }
    settings = folder / "settings.json"
    previous = json.loads(settings.read_text()) if settings.exists() else {}
    for path in folder.glob("*.npy"):
        kind = "found" if path.name.startswith("found-") else "vectors"
        if previous.get(kind) != digests[kind]:
            path.unlink()
    write_json_atomically(settings, digests)


def _write_neighbors(output: Path, run: _RetrievalRun, index: str, found: VectorShards) -> NeighborsInfo:
    """Write the neighbors; `info.json` is written last and marks them complete."""
    (output / "info.json").unlink(missing_ok=True)
    with open_atomic_file(output / "neighbors.npy") as stream:
        content = _write_rows(stream, found, run.search.neighbors)
    info = NeighborsInfo(
        chunk_length=run.search.chunk_length,
        neighbors=run.search.neighbors,
        data=_describe_chunks(run.chunks, range(len(run.chunks))),
        database=_describe_chunks(run.database, run.train),
        encoder=run.encoder.name,
        index=index,
        probes=run.search.probes,
        content=content,
    )
    write_json_atomically(output / "info.json", info.model_dump())
    none = sum(int((block[:, 0] < 0).sum()) for block in found.iterate_blocks(0, len(found)))
    logger.info(
        "%s: searched neighbors of %d chunks among %d chunks; %d have none", output, len(found), len(run.train), none
    )
    return info


def _write_rows(stream: IO[bytes], found: VectorShards, neighbors: int) -> str:
    header = {"descr": "<i8", "fortran_order": False, "shape": (len(found), neighbors)}
    np.lib.format.write_array_header_1_0(stream, header)
    digest = xxhash.xxh3_128()
    for block in found.iterate_blocks(0, len(found)):
        digest.update(np.ascontiguousarray(block).data)
        stream.write(np.ascontiguousarray(block).data)
    return digest.hexdigest()


def _describe_chunks(chunks: DocumentChunks, used: range) -> ChunksInfo:
    path, fingerprint = str(chunks.reader.prefix.resolve()), chunks.reader.fingerprint
    return ChunksInfo(path=path, fingerprint=fingerprint, first=used.start, last=used.stop)
