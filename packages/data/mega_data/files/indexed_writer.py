"""Writes token files in Megatron's indexed format (`mega_data.files.indexed` describes it)."""

from __future__ import annotations

import contextlib
import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.files import fsync_folder
from mega_common.log import ProgressBar
from mega_data.files.indexed import (
    CHUNK,
    DTYPES,
    HEADER,
    MAGIC,
    IndexedReader,
    Tokens,
    bin_path,
    data_prefix,
    idx_path,
    names_beside,
)
from mega_data.making.partial import LOCK, discard, give_names, hold, partial_folder, refusals


def remove_earlier(prefix: Path) -> None:
    """Remove an earlier index, which beside a new `.bin` would be a data set that never was, and after it a mask."""
    for path in (idx_path(prefix), *names_beside(prefix).values()):
        path.unlink(missing_ok=True)
    fsync_folder(prefix.parent)


class IndexedWriter:
    """Writes one data set, in the folder `.NAME.partial` beside it. Until `close` is called, no file has its final name.

    >>> with IndexedWriter(Path("data/wiki"), best_dtype(50_257)) as writer:   # doctest: +SKIP
    ...     writer.add_document(np.array([5, 7, 11]))

    Leaving the context by an error throws everything away, unless `sync` made it last. A data set of the same name stays
    until the new one is whole on disk; a kill in the instant of the change leaves the old one, the new one or no `.idx`,
    never a mixture. What a kill left is cleared by the next writer, or with `resume` kept for `go_on`. With `wait` a
    writer of the same data set is waited for, and not an error.

    With `masked` a byte for each token goes to `PREFIX.mask.bin` and `.idx`.

    Raises:
        DataError: when the dtype is not one of the format's, a token does not fit it, the disk refuses, or another
            process is writing the same data set.
    """

    def __init__(
        self,
        prefix: Path,
        dtype: npt.DTypeLike,
        *,
        resume: bool = False,
        wait: bool = False,
        masked: bool = False,
    ) -> None:
        self.prefix = data_prefix(Path(prefix))
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, name in DTYPES.items() if np.dtype(name) == self.dtype]
        if not codes:
            raise DataError(f"{self.prefix}: tokens cannot be stored as {self.dtype}", hint="uint16 or int32 are usual")
        self._code = codes[0]
        self._lengths = array("i")
        self._ends = array("q", [0])
        self._lasts = False
        self.folder = partial_folder(self.prefix)
        with refusals(self.prefix):
            self._lock = hold(self.folder, wait=wait)
            if self._lock is None:
                raise DataError(f"{self.prefix}: another process is writing this data set")
            self._bin = self._opened("bin")
            self._mask = self._opened("mask.bin") if masked else None
            if not resume:
                self.clear()

    def _opened(self, name: str) -> BinaryIO:
        """A file under way, as it was left."""
        return os.fdopen(os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o666), "wb", buffering=1 << 20)

    @property
    def _streams(self) -> list[BinaryIO]:
        return [self._bin] if self._mask is None else [self._bin, self._mask]

    def clear(self) -> None:
        """Throw away what an interrupted writing left."""
        for path in self.folder.iterdir():
            if path.name not in ("bin", "mask.bin", LOCK):
                path.unlink()
        fsync_folder(self.folder)
        for stream in self._streams:
            stream.truncate(0)

    def sync(self) -> None:
        """Make what was added so far last, for a later writer to `go_on` after it should this one end early."""
        with refusals(self.prefix):
            self._flush()
            for name, values in (("lengths", self._lengths), ("ends", self._ends)):
                with open(self.folder / name, "ab") as stream:
                    known = stream.tell() // values.itemsize
                    stream.write(values[known:].tobytes())
                    stream.flush()
                    os.fsync(stream.fileno())
            fsync_folder(self.folder)
        self._lasts = True

    def go_on(self, documents: int) -> Tokens:
        """Take up an interrupted writing after so many documents; returns their tokens, [n].

        Raises:
            DataError: when less is there than that.
        """
        with refusals(self.prefix):
            ends = np.fromfile(self.folder / "ends", np.int64, documents + 1)
            sequences = int(ends[-1]) if ends.size else 0
            lengths = np.fromfile(self.folder / "lengths", np.int32, sequences)
            tokens = int(lengths.sum(dtype=np.int64))
            size = tokens * self.dtype.itemsize
            whole = ends.size == documents + 1 and lengths.size == sequences
            for stream, wanted in zip(self._streams, (size, tokens), strict=False):
                if not whole or os.fstat(stream.fileno()).st_size < wanted:
                    raise DataError(f"{self.folder}: damaged", hint="remove it to start over")
                stream.truncate(wanted)
                stream.seek(wanted)
            os.truncate(self.folder / "ends", ends.nbytes)
            os.truncate(self.folder / "lengths", lengths.nbytes)
        self._lengths, self._ends = array("i", lengths.tobytes()), array("q", ends.tobytes())
        self._lasts = True
        return np.memmap(self.folder / "bin", self.dtype, "r") if size else np.empty(0, self.dtype)

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Add a document of one sequence, int[n]."""
        values = np.asarray(tokens)
        self.add_documents(values, np.array([values.size]))

    def add_documents(
        self,
        tokens: npt.ArrayLike,
        lengths: npt.ArrayLike,
        mask: Tokens | None = None,
        sequences: npt.ArrayLike | None = None,
    ) -> None:
        """Add many documents: the tokens of their sequences one after another, int[sum(lengths)], and the mask's bytes.

        Each has one sequence, or as many as `sequences` says.
        """
        values, sizes = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        if values.ndim != 1 or sizes.sum() != values.size:
            raise ValueError(f"tokens of shape {values.shape} for documents of {sizes.sum()} tokens together")
        self.write(values, mask)
        self.end_documents(sizes, np.ones(sizes.size, np.int64) if sequences is None else sequences)

    def write(self, tokens: npt.NDArray[Any], mask: Tokens | None = None) -> None:
        """Add tokens, int[n], of documents that are not ended yet, and the mask's bytes."""
        self._write(self._fitting(tokens), mask)

    def end_documents(self, lengths: npt.ArrayLike, sequences: npt.ArrayLike) -> None:
        """End documents: the tokens that were written since are sequences of these lengths, so many for each of them."""
        sizes = np.asarray(lengths, np.int64)
        if sizes.size and sizes.max() > np.iinfo(np.int32).max:
            raise DataError(f"{self.prefix}: a document of {sizes.max():,} tokens; the format ends at 2,147,483,647")
        first = len(self._lengths)
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        self._ends.frombytes((first + np.cumsum(np.asarray(sequences, np.int64))).tobytes())

    def append(self, reader: IndexedReader, bar: ProgressBar | None = None, mask: Tokens | None = None) -> None:
        """Add all documents of another data set, byte by byte; `bar` is advanced by the bytes copied.

        Raises:
            DataError: when it holds tokens of another type.
        """
        if reader.dtype != self.dtype:
            raise DataError(f"{reader.prefix} holds {reader.dtype} and cannot be appended to {self.dtype} tokens")
        for start in range(0, reader.num_tokens, CHUNK):
            piece = reader.tokens[start : start + CHUNK]
            self._write(piece, None if mask is None else mask[start : start + CHUNK])
            if bar is not None:
                bar.advance(piece.nbytes)
        first = len(self._lengths)
        self._lengths.frombytes(reader.lengths.tobytes())
        self._ends.frombytes((reader.document_index[1:] + first).tobytes())

    def finish(self) -> None:
        """Put all that was added, and the index, into the folder for good; it is yet to get its names (`close`)."""
        with refusals(self.prefix):
            self._make_index("idx", self.dtype, self._code)
            if self._mask is not None:
                self._make_index("mask.idx", np.dtype(np.uint8), 1)
            self._flush()

    def close(self) -> None:
        """Make the data set appear: everything is on disk before `.bin` and then `.idx` get their names.

        Nothing happens after `release`.
        """
        if self._lock is None:
            return
        try:
            self.finish()
            with refusals(self.prefix):
                remove_earlier(self.prefix)
                give_names(
                    self.folder,
                    {"bin": bin_path(self.prefix), **names_beside(self.prefix), "idx": idx_path(self.prefix)},
                )
        except BaseException:
            self.abort()
            raise
        self._lasts = False
        self.abort()

    def abort(self) -> None:
        """Throw away what was written, or what was since the last `sync`. Nothing happens after `release`."""
        if self._lock is not None and not self._lasts:
            discard(self.folder)
        self.release()

    def release(self) -> None:
        """Leave everything as it is, to whoever comes next."""
        for stream in self._streams:
            with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses again
                stream.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _flush(self) -> None:
        for stream in self._streams:
            stream.flush()
            os.fsync(stream.fileno())

    def _make_index(self, name: str, dtype: np.dtype[Any], code: int) -> None:
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        pointers = np.zeros(lengths.size, np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= dtype.itemsize
        with open(self.folder / name, "wb") as stream:
            stream.write(HEADER.pack(MAGIC, 1, code, lengths.size, len(self._ends)))
            for part in (lengths, pointers, np.frombuffer(self._ends, np.int64)):
                stream.write(part.data)
            stream.flush()
            os.fsync(stream.fileno())

    def _fitting(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if values.size and not np.can_cast(values.dtype, self.dtype, "safe"):
            low, high, limits = values.min(), values.max(), np.iinfo(self.dtype)
            if low < limits.min or high > limits.max or not np.issubdtype(values.dtype, np.integer):
                wrong = low if low < limits.min else high
                raise DataError(
                    f"{self.prefix}: token {wrong} does not fit {self.dtype} ({limits.min} to {limits.max})",
                    hint="the dtype must be chosen for the tokenizer's whole vocabulary",
                )
        return values.astype(self.dtype, copy=False)

    def _write(self, values: npt.NDArray[Any], mask: Tokens | None) -> None:
        if (self._mask is None) != (mask is None) or (mask is not None and mask.size != values.size):
            raise ValueError(f"a mask of {None if mask is None else mask.size} bytes for {values.size} tokens")
        with refusals(self.prefix):
            self._bin.write(np.ascontiguousarray(values).data)
            if self._mask is not None:
                self._mask.write(np.ascontiguousarray(mask).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()
