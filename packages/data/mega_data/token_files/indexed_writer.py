"""Writer of token files in Megatron's indexed format (see `mega_data.token_files.indexed_reader`)."""

from __future__ import annotations

import contextlib
import os
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from mega_common.atomic_files import fsync_directory
from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar
from mega_data.token_files.indexed_reader import (
    CHUNK,
    DTYPES,
    HEADER,
    MAGIC,
    IndexedReader,
    Tokens,
    get_bin_path,
    get_idx_path,
    list_companion_files,
    strip_data_suffix,
)
from mega_data.token_files.partial_folder import (
    LOCK,
    convert_write_errors_to_data_error,
    get_partial_folder,
    lock_partial_folder,
    move_files_durably,
    remove_partial_folder,
)


def remove_earlier_index(prefix: Path) -> None:
    """Remove the `.idx`, the mask and the images of an earlier data set at `prefix`.
    The `.idx`, which would not match a new `.bin`, is removed first, then the mask and image files.
    """
    for path in (get_idx_path(prefix), *list_companion_files(prefix).values()):
        path.unlink(missing_ok=True)
    fsync_directory(prefix.parent)


class IndexedWriter:
    """Writer of one token data set (Megatron's `.bin` and `.idx`).
    It writes in the folder `.NAME.partial` next to the data set. No file has its final name until `close`.

    >>> with IndexedWriter(Path("data/wiki"), select_token_dtype(50_257)) as writer:   # doctest: +SKIP
    ...     writer.add_document(np.array([5, 7, 11]))

    An error in the context discards everything that `sync_to_disk` has not made durable. An existing data set of the
    same name stays until the new one is complete on disk; a kill during the renames leaves the old one, the new one or
    no `.idx`, never a mixture. The next writer removes partial files of a killed one, or with `resume` keeps them for
    `resume_after_documents`. With `wait`, wait for another writer of the same data set instead of raising.

    With `masked`, one byte per token is written to `PREFIX.mask.bin` and `.idx`.

    Raises:
        DataError: if the format does not have the dtype, a token does not fit it, a file cannot be written, or another
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
        self.prefix = strip_data_suffix(Path(prefix))
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, name in DTYPES.items() if np.dtype(name) == self.dtype]
        if not codes:
            raise DataError(f"{self.prefix}: tokens cannot be stored as {self.dtype}", hint="use uint16 or int32")
        self._code = codes[0]
        self._lengths = array("i")
        self._ends = array("q", [0])
        self._durable = False
        self.folder = get_partial_folder(self.prefix)
        with convert_write_errors_to_data_error(self.prefix):
            self._lock = lock_partial_folder(self.folder, wait=wait)
            if self._lock is None:
                raise DataError(f"{self.prefix}: another process is writing this data set")
            self._bin = self._open_partial_file("bin")
            self._mask = self._open_partial_file("mask.bin") if masked else None
            if not resume:
                self.clear_partial_files()

    def _open_partial_file(self, name: str) -> BinaryIO:
        """Open a partially written file with its contents."""
        return os.fdopen(os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o666), "wb", buffering=1 << 20)

    @property
    def _streams(self) -> list[BinaryIO]:
        return [self._bin] if self._mask is None else [self._bin, self._mask]

    def clear_partial_files(self) -> None:
        """Delete or empty the partial files of an interrupted run, except the lock, to start from zero."""
        for path in self.folder.iterdir():
            if path.name not in ("bin", "mask.bin", LOCK):
                path.unlink()
        fsync_directory(self.folder)
        for stream in self._streams:
            stream.truncate(0)

    def sync_to_disk(self) -> None:
        """Flush everything added so far to disk, from where a later writer's `resume_after_documents` can continue."""
        with convert_write_errors_to_data_error(self.prefix):
            self._flush()
            for name, values in (("lengths", self._lengths), ("ends", self._ends)):
                with open(self.folder / name, "ab") as stream:
                    written = stream.tell() // values.itemsize
                    stream.write(values[written:].tobytes())
                    stream.flush()
                    os.fsync(stream.fileno())
            fsync_directory(self.folder)
        self._durable = True

    def resume_after_documents(self, documents: int) -> Tokens:
        """Continue the partial files of an interrupted run after its first `documents` documents; return these tokens.
        The rest is cut off.

        Raises:
            DataError: if the partial files have fewer documents.
        """
        with convert_write_errors_to_data_error(self.prefix):
            ends = np.fromfile(self.folder / "ends", np.int64, documents + 1)
            sequences = int(ends[-1]) if ends.size else 0
            lengths = np.fromfile(self.folder / "lengths", np.int32, sequences)
            tokens = int(lengths.sum(dtype=np.int64))
            size = tokens * self.dtype.itemsize
            whole = ends.size == documents + 1 and lengths.size == sequences
            for stream, expected in zip(self._streams, (size, tokens), strict=False):
                if not whole or os.fstat(stream.fileno()).st_size < expected:
                    raise DataError(f"{self.folder}: is damaged", hint="remove the folder to start from zero")
                stream.truncate(expected)
                stream.seek(expected)
            os.truncate(self.folder / "ends", ends.nbytes)
            os.truncate(self.folder / "lengths", lengths.nbytes)
        self._lengths, self._ends = array("i", lengths.tobytes()), array("q", ends.tobytes())
        self._durable = True
        return np.memmap(self.folder / "bin", self.dtype, "r") if size else np.empty(0, self.dtype)

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Add a document of one sequence with these tokens, int [n]."""
        values = np.asarray(tokens)
        self.add_documents(values, np.array([values.size]))

    def add_documents(
        self,
        tokens: npt.ArrayLike,
        lengths: npt.ArrayLike,
        mask: Tokens | None = None,
        sequences: npt.ArrayLike | None = None,
    ) -> None:
        """Add documents, given the concatenated `tokens` and `lengths` of their sequences, by default one per document.
        A `mask` has one byte per token.

        `sequences` is the number of sequences of each document, by default one. Raises ValueError if the lengths do not
        add up to the number of tokens.
        """
        values, sizes = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        if values.ndim != 1 or sizes.sum() != values.size:
            raise ValueError(f"tokens of shape {values.shape} for documents with {sizes.sum()} tokens in total")
        self.write_tokens(values, mask)
        self.end_documents(sizes, np.ones(sizes.size, np.int64) if sequences is None else sequences)

    def write_tokens(self, tokens: npt.NDArray[Any], mask: Tokens | None = None) -> None:
        """Write tokens, int [n], of documents that a later `end_documents` ends, and with a mask one byte per token."""
        self._write_checked(self._cast_tokens(tokens), mask)

    def end_documents(self, lengths: npt.ArrayLike, sequences: npt.ArrayLike) -> None:
        """Divide the tokens written since the last call into sequences of `lengths` and documents of `sequences` sequences.
        Document i has `sequences[i]` sequences. Raises DataError for a sequence that is too long for the format.
        """
        sizes = np.asarray(lengths, np.int64)
        if sizes.size and sizes.max() > np.iinfo(np.int32).max:
            raise DataError(
                f"{self.prefix}: a document has {sizes.max():,} tokens; the format supports at most 2,147,483,647"
            )
        first = len(self._lengths)
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        self._ends.frombytes((first + np.cumsum(np.asarray(sequences, np.int64))).tobytes())

    def append_dataset(self, reader: IndexedReader, bar: ProgressBar | None = None, mask: Tokens | None = None) -> None:
        """Append all documents of another data set, byte by byte; `bar` is advanced by the number of bytes copied.

        Raises:
            DataError: if its dtype differs.
        """
        if reader.dtype != self.dtype:
            raise DataError(f"{reader.prefix}: {reader.dtype} tokens cannot be appended to {self.dtype} tokens")
        for start in range(0, reader.num_tokens, CHUNK):
            piece = reader.tokens[start : start + CHUNK]
            self._write_checked(piece, None if mask is None else mask[start : start + CHUNK])
            if bar is not None:
                bar.advance(piece.nbytes)
        first = len(self._lengths)
        self._lengths.frombytes(reader.lengths.tobytes())
        self._ends.frombytes((reader.document_index[1:] + first).tobytes())

    def finish_files(self) -> None:
        """Write the index and flush all files in the partial folder to disk, without renaming them."""
        with convert_write_errors_to_data_error(self.prefix):
            self._write_index("idx", self.dtype, self._code)
            if self._mask is not None:
                self._write_index("mask.idx", np.dtype(np.uint8), 1)
            self._flush()

    def close(self) -> None:
        """Finish the files of a data set and rename them to their final names, replacing an earlier data set.

        The `.idx` is renamed last. No effect after `release_lock`.
        """
        if self._lock is None:
            return
        try:
            self.finish_files()
            with convert_write_errors_to_data_error(self.prefix):
                remove_earlier_index(self.prefix)
                move_files_durably(
                    self.folder,
                    {
                        "bin": get_bin_path(self.prefix),
                        **list_companion_files(self.prefix),
                        "idx": get_idx_path(self.prefix),
                    },
                )
        except BaseException:
            self.abort()
            raise
        self._durable = False
        self.abort()

    def abort(self) -> None:
        """Release the lock and discard everything written since the last `sync_to_disk`.
        Without one, all partial files are discarded. No effect after `release_lock`.
        """
        if self._lock is not None and not self._durable:
            remove_partial_folder(self.folder)
        self.release_lock()

    def release_lock(self) -> None:
        """Close the unfinished files and release their lock, leaving the files for a later writer or commit."""
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

    def _write_index(self, name: str, dtype: np.dtype[Any], code: int) -> None:
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

    def _cast_tokens(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if values.size and not np.can_cast(values.dtype, self.dtype, "safe"):
            low, high, limits = values.min(), values.max(), np.iinfo(self.dtype)
            if low < limits.min or high > limits.max or not np.issubdtype(values.dtype, np.integer):
                wrong = low if low < limits.min else high
                raise DataError(
                    f"{self.prefix}: token {wrong} does not fit {self.dtype} ({limits.min} to {limits.max})",
                    hint="choose the dtype for the whole vocabulary of the tokenizer",
                )
        return values.astype(self.dtype, copy=False)

    def _write_checked(self, values: npt.NDArray[Any], mask: Tokens | None) -> None:
        if (self._mask is None) != (mask is None) or (mask is not None and mask.size != values.size):
            raise ValueError(f"a mask of {None if mask is None else mask.size} bytes for {values.size} tokens")
        with convert_write_errors_to_data_error(self.prefix):
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
