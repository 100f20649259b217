"""Data sets in chunks, and an embedder that needs no model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from masked_data import save_word_pieces

from mega_data.retrieval.neighbor_files import NeighborsInfo, get_neighbors_path
from mega_data.retrieval.retrieve_neighbors import ChunkEncoder, RetrievalSettings, retrieve_neighbors
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer

FIRST_WORD = 7  # the token w0 of `save_word_pieces`


def documents(prefix: Path, rows: Sequence[Sequence[int]]) -> IndexedReader:
    """A data set of these documents, as numbers of words."""
    tokens = np.array([word for row in rows for word in row], np.int64) + FIRST_WORD
    with IndexedWriter(prefix, "int32") as writer:
        writer.add_documents(tokens, [len(row) for row in rows])
    return IndexedReader(prefix)


def embed(texts: list[str], advance: Callable[[int], None]) -> npt.NDArray[np.float32]:
    """How often words of each of 60 kinds come in a text, fp32 [n, 60]."""
    found = np.zeros((len(texts), 60), np.float32)
    for row, text in enumerate(texts):
        for word in text.split():
            found[row, zlib.crc32(word.encode()) % 60] += 1
    advance(len(texts))
    return found


def found(folder: Path, data: Path, database: Path | None = None, **search: Any) -> NeighborsInfo:
    """The neighbors of a data set beside it; a tokenizer comes into `folder`."""
    tokenizer = Tokenizer(save_word_pieces(folder / "words"))
    settings = RetrievalSettings(**{"chunk_length": 8, **search})
    encoder = ChunkEncoder("words", "1", embed)
    return retrieve_neighbors(data, database, get_neighbors_path(data), tokenizer, encoder, settings, overwrite=True)
