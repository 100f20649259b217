"""Blocks of consecutive documents for order `blocks`: of token files, and of streamed raw data with the same results.

A block ends with the document that brings it to `data.block_tokens` tokens. Each is a data set by itself, with the tokens
and the content fingerprint that its documents have as token files, so all draws in it are the same for both.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mega_data.preprocessing.token_stream import FIRST, BlockPosition, TokenStream
from mega_data.sampling.document_order import find_token_range
from mega_data.token_files.indexed_reader import IndexedReader, MappedArrays


@dataclass(frozen=True)
class OpenedDocumentBlock:
    """Block of consecutive whole documents, opened for reading, with the start of the next block.

    Attributes:
        cache: folder of indices of this block alone; None for the cache of the run.
        end: start of the next block; None for the last one.
    """

    reader: IndexedReader
    cache: Path | None
    end: BlockPosition | None


class DataBlockSource(Protocol):
    """Interface of the blocks of a data set, in the order of its documents."""

    @property
    def first(self) -> BlockPosition:
        """Start of the first block."""

    @property
    def content_key(self) -> str:
        """Text that names everything that the blocks depend on."""

    def open_block(self, start: BlockPosition) -> OpenedDocumentBlock | None:
        """Return the block at `start`, or None if no document is left."""

    def remove_block(self, start: BlockPosition) -> None:
        """Release the files of a block that was read."""

    def estimate_epoch(self, samples: int, start: BlockPosition) -> float | None:
        """Return the approximate number of samples of an epoch, or None if reading all blocks to count them is cheap.
        Of these, `samples` are before the block at `start`.
        """


class FileBlocks:
    """Blocks of the sequences [first, last) of token files; a block starts at (document number,)."""

    def __init__(self, reader: IndexedReader, first: int, last: int, block_tokens: int) -> None:
        self._reader, self._first, self._last, self._block_tokens = reader, first, last, block_tokens
        bounds = reader.document_index
        self.first = (int(np.searchsorted(bounds, first, "right")) - 1,)
        self._end = int(np.searchsorted(bounds, last, "left"))
        self.content_key = f"data={reader.fingerprint} range={first}:{last} block={block_tokens}"

    def open_block(self, start: BlockPosition) -> OpenedDocumentBlock | None:
        """Return the block at `start`, or None if no document is left."""
        (document,) = start
        if document >= self._end:
            return None
        target = self._count_tokens_before(document) + self._block_tokens
        end = bisect_left(range(self._end), target, document + 1, key=self._count_tokens_before)
        block = IndexedSlice(self._reader, self._clip_to_range(document), self._clip_to_range(end))
        return OpenedDocumentBlock(block, None, (end,) if end < self._end else None)

    def _clip_to_range(self, document: int) -> int:
        """Return the first sequence of a document within the range."""
        return min(max(int(self._reader.document_index[document]), self._first), self._last)

    def _count_tokens_before(self, document: int) -> int:
        return self._reader.find_token_position(self._clip_to_range(document))

    def remove_block(self, start: BlockPosition) -> None:
        """Do nothing: token files stay, as they do not belong to the run."""

    def estimate_epoch(self, samples: int, start: BlockPosition) -> float | None:
        """Return None: the blocks of token files are quickly read."""
        return None


class StreamBlocks:
    """Blocks of streamed raw data, which are tokenized when they are opened."""

    first = FIRST

    def __init__(self, stream: TokenStream) -> None:
        self._stream, self.content_key = stream, stream.content_key

    def open_block(self, start: BlockPosition) -> OpenedDocumentBlock | None:
        """Return the block at `start`, which is tokenized if needed, or None if no document is left."""
        files = self._stream.open_block(start)
        return (
            None if files is None else OpenedDocumentBlock(IndexedReader(files.prefix), files.prefix.parent, files.end)
        )

    def remove_block(self, start: BlockPosition) -> None:
        """Remove the token files and indices of a block."""
        self._stream.remove_block(start)

    def estimate_epoch(self, samples: int, start: BlockPosition) -> float | None:
        """Return the number of samples of an epoch, estimated by the input before `start`; infinity in shard 1."""
        return samples * self._stream.num_shards / (start[0] - 1) if start[0] > 1 else float("inf")


class IndexedSlice(IndexedReader):
    """Reader of the sequences [first, last) of token files as a data set by itself.

    Its sequences, documents and token positions count from 0, so its arrays and fingerprint equal the ones of token files with
    these documents alone; only `prefix` names the whole.
    """

    def __init__(self, whole: IndexedReader, first: int, last: int) -> None:
        self.prefix, self.dtype = whole.prefix, whole.dtype
        self._whole, self._first, self._sequences = whole, first, last - first
        self._begin, end = find_token_range(whole, first, last)
        self.num_tokens = end - self._begin
        bounds = whole.document_index
        inner = bounds[np.searchsorted(bounds, first, "right") : np.searchsorted(bounds, last, "left")]
        self._index = (
            whole.lengths[first:last].copy(),
            whole.pointers[first:last] - self._begin * self.dtype.itemsize,
            np.concatenate([[0], inner - first, [last - first]]),
        )
        self.documents = inner.size + 1

    def find_token_position(self, i: int) -> int:
        """Return the number of tokens of the slice before its sequence `i`."""
        return self.num_tokens if i == len(self) else int(self.pointers[i]) // self.dtype.itemsize

    def open_companion(self, prefix: Path) -> IndexedReader:
        """Open the same sequences of token files with equal sequence lengths, such as the loss mask."""
        return IndexedSlice(self._whole.open_companion(prefix), self._first, self._first + len(self))

    def close(self) -> None:
        """Do nothing: the reader of the whole data set releases the tokens, and the index is small."""

    def _get_arrays(self) -> MappedArrays:
        return MappedArrays(*self._index, self._whole.tokens[self._begin : self._begin + self.num_tokens])
