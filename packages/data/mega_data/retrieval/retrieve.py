"""Neighbours of all chunks of a data set: embed chunks, build an index, search; it goes on where it was ended."""

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

from mega_common.errors import ConfigError, DataError
from mega_common.files import atomic_file, write_json
from mega_common.log import ProgressBar, logger
from mega_data.files.indexed import IndexedReader
from mega_data.files.info import read_info
from mega_data.making.partial import discard, hold, partial_folder, refusals
from mega_data.order.parts import split_bounds
from mega_data.retrieval.chunks import Chunks
from mega_data.retrieval.copies import Copies
from mega_data.retrieval.index import NearestVectors, default_index
from mega_data.retrieval.neighbors import ChunksInfo, NeighborsInfo
from mega_data.retrieval.vectors import Rows
from mega_data.tokenizer import Tokenizer

Embed: TypeAlias = Callable[[list[str], Callable[[int], None]], npt.NDArray[np.float32]]
"""Makes fp32 [n, D] of n texts, and tells of those that are done."""


@dataclass(frozen=True)
class Encoder:
    """What embeds chunks: its name, what tells it from others and from what it was, and how."""

    name: str
    identity: str
    embed: Embed


@dataclass(frozen=True)
class Search:
    """What is searched, and how.

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


def retrieve(
    data: Path,
    database: Path | None,
    output: Path,
    tokenizer: Tokenizer,
    encoder: Encoder,
    search: Search,
    *,
    overwrite: bool,
) -> NeighborsInfo:
    """Find the neighbours of each chunk of `data` in `database`, by default itself, and write them to the folder `output`.

    Vectors and what was found are kept in `.OUTPUT.partial`, by files, until all is there.

    Raises:
        DataError: when the output exists, a data set cannot be used, or they are of different tokenizers.
        ConfigError: when the index cannot be built, or the split gives nothing to train.
        MissingPackageError: without faiss.
    """
    if (output / "info.json").exists() and not overwrite:
        raise DataError(f"{output}: exists already", hint="choose another --output, or say --overwrite")
    chunks = Chunks(IndexedReader(data), search.chunk_length)
    found_in = chunks if database is None else Chunks(IndexedReader(database), search.chunk_length)
    if found_in.reader.fingerprint == chunks.reader.fingerprint:
        found_in = chunks
    _check_tokenizers(chunks.reader, found_in.reader)
    own = _train_share(found_in, search.split)
    folder = partial_folder(output)
    with refusals(output):
        lock = hold(folder, wait=False)
        if lock is None:
            raise DataError(f"{output}: another process makes it", hint="wait for its end, or choose another --output")
        try:
            made = _Making(chunks, found_in, own, folder, encoder, search)
            made.embed(tokenizer)
            index, found = made.search()
            info = _write(output, made, index, found)
            discard(folder)
        finally:
            os.close(lock)
    return info


def _check_tokenizers(one: IndexedReader, other: IndexedReader) -> None:
    made = [info.tokenizer for reader in (one, other) if (info := read_info(reader.prefix)) and info.tokenizer]
    if len({tokenizer.fingerprint for tokenizer in made}) > 1:
        raise DataError(
            f"{other.prefix}: made with another tokenizer than {one.prefix}, whose model is to read it",
            hint="preprocess both with one tokenizer",
        )


def _train_share(chunks: Chunks, split: tuple[float, ...]) -> range:
    """The chunks that are trained on, as `order.parts` cuts a data set of kind retro."""
    bound = split_bounds(split)[0]
    if bound is None:
        raise ConfigError(f"--split {split}: gives nothing to train")
    last = round(bound[1] * float(chunks.reader.documents))
    own = range(int(chunks.starts[last]))
    if not own:
        raise DataError(f"{chunks.reader.prefix}: has no token in its first {last} documents, which train would read")
    return own


class _Making:
    """Vectors and neighbours on their way, in the files of a folder that this process holds."""

    def __init__(
        self, chunks: Chunks, found_in: Chunks, own: range, folder: Path, encoder: Encoder, search: Search
    ) -> None:
        self.chunks, self.found_in, self.own, self.encoder, self.search_for = chunks, found_in, own, encoder, search
        self._same = chunks is found_in
        of = [search.chunk_length, encoder.identity, chunks.reader.fingerprint, found_in.reader.fingerprint]
        of += [] if self._same else [own.stop]
        _begin(folder, of, [search.neighbors, search.index, search.probes, own.stop])
        self._queries = Rows(folder, "data", len(chunks))
        self._keys = self._queries if self._same else Rows(folder, "database", own.stop)
        self._found = Rows(folder, "found", len(chunks))

    def embed(self, tokenizer: Tokenizer) -> None:
        """Make the vectors that are not there yet."""
        todo = [(self.chunks, self._queries)] + ([] if self._same else [(self.found_in, self._keys)])
        missing = [(chunks, rows, span) for chunks, rows in todo for span in rows.missing()]
        with ProgressBar("embedding", total=sum(len(span) for *_, span in missing), unit="chunks") as bar:
            for chunks, rows, span in missing:
                tokens = chunks.tokens(np.asarray(span), chunks.length)
                texts = [tokenizer.decode(row[row >= 0].tolist(), skip_special_tokens=True) for row in tokens]
                rows.put(span.start, self.encoder.embed(texts, bar.advance))

    def search(self) -> tuple[str, Rows]:
        """Find the neighbours that are not found yet; what index they are of."""
        width = next(self._keys.blocks(0, 1)).shape[1]
        named = self.search_for.index or default_index(len(self.own), width)
        missing = list(self._found.missing())
        if not missing:
            return named, self._found
        index = NearestVectors(self._keys, self.own.stop, factory=named, probes=self.search_for.probes)
        copies = Copies(self.chunks, self.found_in)
        with ProgressBar("searching", total=sum(map(len, missing)), unit="chunks") as bar:
            for span in missing:
                vectors = np.concatenate(list(self._queries.blocks(span.start, span.stop)))

                def allowed(rows: Any, found: Any, first: int = span.start) -> Any:
                    return copies.allowed(first + rows, found)

                self._found.put(span.start, index.nearest(vectors, self.search_for.neighbors, allowed))
                bar.advance(len(span))
        return named, self._found


def _begin(folder: Path, of: list[Any], how: list[Any]) -> None:
    """Keep of an earlier run what this one would make again: its vectors, if they are of the same, and what it found in them."""
    digests = {
        name: hashlib.sha256(repr(told).encode()).hexdigest() for name, told in (("vectors", of), ("found", [of, how]))
    }
    settings = folder / "settings.json"
    known = json.loads(settings.read_text()) if settings.exists() else {}
    for path in folder.glob("*.npy"):
        what = "found" if path.name.startswith("found-") else "vectors"
        if known.get(what) != digests[what]:
            path.unlink()
    write_json(settings, digests)


def _write(output: Path, made: _Making, index: str, found: Rows) -> NeighborsInfo:
    """Put together what was found; `info.json` says at last that it is whole."""
    (output / "info.json").unlink(missing_ok=True)
    with atomic_file(output / "neighbors.npy") as stream:
        content = _save(stream, found, made.search_for.neighbors)
    info = NeighborsInfo(
        chunk_length=made.search_for.chunk_length,
        neighbors=made.search_for.neighbors,
        data=_told(made.chunks, range(len(made.chunks))),
        database=_told(made.found_in, made.own),
        encoder=made.encoder.name,
        index=index,
        probes=made.search_for.probes,
        content=content,
    )
    write_json(output / "info.json", info.model_dump())
    none = sum(int((block[:, 0] < 0).sum()) for block in found.blocks(0, len(found)))
    logger.info("%s: neighbours of %d chunks in %d, %d have none", output, len(found), len(made.own), none)
    return info


def _save(stream: IO[bytes], found: Rows, neighbors: int) -> str:
    header = {"descr": "<i8", "fortran_order": False, "shape": (len(found), neighbors)}
    np.lib.format.write_array_header_1_0(stream, header)
    digest = xxhash.xxh3_128()
    for block in found.blocks(0, len(found)):
        digest.update(np.ascontiguousarray(block).data)
        stream.write(np.ascontiguousarray(block).data)
    return digest.hexdigest()


def _told(chunks: Chunks, own: range) -> ChunksInfo:
    reader = chunks.reader
    return ChunksInfo(path=str(reader.prefix.resolve()), fingerprint=reader.fingerprint, first=own.start, last=own.stop)
