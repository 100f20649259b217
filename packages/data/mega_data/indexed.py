"""Token files in Megatron's indexed format: `PREFIX.bin` holds the tokens, `PREFIX.idx` says where each sequence lies.

The `.bin` is every sequence's tokens one after another, little-endian, without a header. The `.idx` is a header of 34
bytes (magic 9, version u64, dtype code u8, sequence count S u64, length D of the document index u64), then S int32
lengths in tokens, S int64 byte pointers, D int64 document bounds (0, then the sequence count after each document) and
optionally S int8 modes, which only multimodal data has. Everything is little-endian.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from array import array
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_common.files import fsync_folder
from mega_common.log import ProgressBar
from mega_data.fetch import local_prefix
from mega_data.partial import LOCK, discard, give_names, hold, partial_folder, refusals

Tokens = npt.NDArray[np.integer[Any]]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
CHUNK = 1 << 22


def best_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type Megatron uses for token ids of a vocabulary: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


def data_prefix(path: Path) -> Path:
    """The prefix that is meant by one of a data set's two files: `wiki` for `wiki.bin`, unless `wiki.bin.idx` exists."""
    meant = path.suffix in (".bin", ".idx") and not path.with_name(path.name + ".idx").exists()
    return path.with_suffix("") if meant else path


def bin_path(prefix: Path) -> Path:
    """`PREFIX.bin`."""
    prefix = data_prefix(prefix)
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """`PREFIX.idx`."""
    prefix = data_prefix(prefix)
    return prefix.with_name(prefix.name + ".idx")


def mask_prefix(prefix: Path) -> Path:
    """`PREFIX.mask`, the data set that has a byte for each token of another: its weight in the loss."""
    prefix = data_prefix(prefix)
    return prefix.with_name(prefix.name + ".mask")


def mask_names(prefix: Path) -> dict[str, Path]:
    """The files of a mask as `give_names` takes them."""
    mask = mask_prefix(prefix)
    return {"mask.bin": bin_path(mask), "mask.idx": idx_path(mask)}


def remove_earlier(prefix: Path) -> None:
    """Remove an earlier index, which beside a new `.bin` would be a data set that never was, and after it a mask."""
    for path in (idx_path(prefix), *mask_names(prefix).values()):
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
        if sizes.size and sizes.max() > np.iinfo(np.int32).max:
            raise DataError(f"{self.prefix}: a document of {sizes.max():,} tokens; the format ends at 2,147,483,647")
        self._write(self._fitting(values), mask)
        first = len(self._lengths)
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        counts = np.ones(sizes.size, np.int64) if sequences is None else np.asarray(sequences, np.int64)
        self._ends.frombytes((first + np.cumsum(counts)).tobytes())

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
                    self.folder, {"bin": bin_path(self.prefix), **mask_names(self.prefix), "idx": idx_path(self.prefix)}
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


@contextlib.contextmanager
def _readable(prefix: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        many = "each data set takes two: raise the limit (ulimit -Hn), or put some together with mega data merge"
        hint = many if error.errno == errno.EMFILE else None
        raise DataError(f"{prefix}: cannot be read ({error.strerror})", hint=hint) from error


class OpenFiles:
    """Keeps the files of so many data sets open, those that were opened last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._readers: deque[IndexedReader] = deque()

    def opened(self, reader: IndexedReader) -> None:
        """Close what was opened first, where this one is one too many."""
        self._readers.append(reader)
        while len(self._readers) > self._most:
            self._readers.popleft().close()


class _Arrays(NamedTuple):
    """What is mapped of a data set's two files."""

    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    document_index: npt.NDArray[np.int64]
    tokens: Tokens


class IndexedReader:
    """A memory-mapped data set of S sequences; every claim of the index is checked against the files on opening.

    With `files` only the header, the sizes and the ends of the index are read on opening, by a few small reads; the files
    are mapped, and the first time checked, when something is asked of them, and closed again when `files` has others.
    A URL is fetched first (`local_prefix`).

    Attributes:
        documents: their number.
        num_tokens: in all sequences.

    Raises:
        DataError: naming the file, what was expected and what was found.
    """

    def __init__(self, prefix: Path, files: OpenFiles | None = None) -> None:
        self.prefix = data_prefix(local_prefix(Path(prefix)))
        self._bin, self._idx, self._files = bin_path(self.prefix), idx_path(self.prefix), files
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise DataError(f"{path}: no such file", hint=self._nearby())
        with _readable(self.prefix):
            code, self._sequences, bounds = self._read_header()
            self._size = self._bin.stat().st_size
        self._bounds, self.documents, self.dtype = bounds, max(0, bounds - 1), np.dtype(DTYPES[code])
        self.num_tokens = self._size // self.dtype.itemsize
        self._arrays: _Arrays | None = None
        self._checked = False
        if files is None:
            self.check()
        else:
            self._check_ends()

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """int32 [S], tokens of each sequence."""
        return self._mapped().lengths

    @property
    def pointers(self) -> npt.NDArray[np.int64]:
        """int64 [S], byte position of each sequence in the `.bin`."""
        return self._mapped().pointers

    @property
    def document_index(self) -> npt.NDArray[np.int64]:
        """int64 [documents + 1], the first sequence of each document, then S."""
        return self._mapped().document_index

    @property
    def tokens(self) -> Tokens:
        """[num_tokens] in `dtype`, all sequences one after another."""
        return self._mapped().tokens

    @property
    def index_bytes(self) -> int:
        """Of the `.idx`: what checking it reads."""
        return HEADER.size + 12 * self._sequences + 8 * (self.documents + 1)

    def check(self) -> None:
        """Hold the whole index against the files, once.

        Raises:
            DataError: as on opening.
        """
        self._mapped()

    def position(self, i: int) -> int:
        """Tokens before sequence `i`, or of all for i = S, by one small read where the files are not mapped."""
        if i in (0, self._sequences):
            return self.num_tokens if i else 0
        if self._arrays is not None:
            return int(self.pointers[i]) // self.dtype.itemsize
        (pointer,) = self._at(HEADER.size + 4 * self._sequences + 8 * i, "<q")
        return int(pointer) // self.dtype.itemsize

    def close(self) -> None:
        """Give the files, and what was read of them into memory, back until something is asked of them again."""
        self._arrays = None

    def _mapped(self) -> _Arrays:
        arrays = self._arrays
        if arrays is None:
            arrays = self._arrays = self._map()
            if self._files is not None:
                self._files.opened(self)
        return arrays

    def _map(self) -> _Arrays:
        if not self._checked:
            self._check_index(*self._map_index())
            self._checked = True
        index = self._map_index()  # anew: the pages that a check has read are given back
        with _readable(self.prefix):
            mapped: Tokens = np.memmap(self._bin, self.dtype, "r") if self._size else np.empty(0, self.dtype)
        return _Arrays(*index, np.asarray(mapped))  # a plain array: slices of a memmap are slower

    def _map_index(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        with _readable(self.prefix):
            raw = np.memmap(self._idx, np.uint8, "r")
        at, sequences = HEADER.size, self._sequences
        return (
            np.frombuffer(raw, "<i4", sequences, at),
            np.frombuffer(raw, "<i8", sequences, at + 4 * sequences),
            np.frombuffer(raw, "<i8", self._bounds, at + 12 * sequences),
        )

    def _at(self, offset: int, form: str) -> tuple[Any, ...]:
        with _readable(self.prefix), open(self._idx, "rb", buffering=0) as stream:
            return struct.unpack(form, os.pread(stream.fileno(), struct.calcsize(form), offset))

    def _check_ends(self) -> None:
        """That the last sequence ends where the `.bin` does, and the documents with the sequences."""
        last, end, at = 0, 0, HEADER.size
        if self._sequences:
            (length,) = self._at(at + 4 * self._sequences - 4, "<i")
            (last,) = self._at(at + 12 * self._sequences - 8, "<q")
            end = last + length * self.dtype.itemsize
        if end != self._size:
            raise self._other_size(end)
        if self._bounds and self._at(at + 12 * self._sequences + 8 * (self._bounds - 1), "<q") != (self._sequences,):
            raise self._wrong_documents()

    def _other_size(self, expected: int) -> DataError:
        return DataError(
            f"{self._bin}: {self._size:,} bytes, but {self._idx.name} describes {expected:,}",
            hint="the two files are not of one run, or one is truncated; make or copy the data set anew",
        )

    def _wrong_documents(self) -> DataError:
        return DataError(f"{self._idx}: the document index does not rise from 0 to the {len(self)} sequences")

    def _nearby(self) -> str:
        """Megatron's tools add `_text_document` to the name they are given; people forget it."""
        names = sorted(path.name.removesuffix(".idx") for path in self.prefix.parent.glob("*.idx"))
        near = [name for name in names if name.startswith(self.prefix.name)] or names
        if near:
            return f"data sets in {self.prefix.parent}: {', '.join(near[:8])}"
        return f"one is made of text by mega data preprocess --output {self.prefix}"

    def _read_header(self) -> tuple[int, int, int]:
        """Dtype code, sequence count and length of the document index."""
        size = self._idx.stat().st_size
        with open(self._idx, "rb") as stream:
            head = stream.read(HEADER.size)
        if not head.startswith(MAGIC):
            raise DataError(f"{self._idx}: not an index of token files: begins with {head[:9]!r}, expected {MAGIC!r}")
        if len(head) < HEADER.size:
            raise DataError(f"{self._idx}: truncated: {size} bytes, and the header alone has {HEADER.size}")
        _, version, code, sequences, bounds = HEADER.unpack(head)
        if version != 1:
            raise DataError(f"{self._idx}: version {version}, expected 1")
        if code not in DTYPES:
            found = f"{FLOATS[code]}, which are no tokens" if code in FLOATS else "unknown"
            raise DataError(f"{self._idx}: dtype code {code} is {found}; expected one of {sorted(DTYPES)}")
        expected = HEADER.size + 12 * sequences + 8 * bounds
        if size not in (expected, expected + sequences):
            raise DataError(
                f"{self._idx}: {size:,} bytes, but its header ({sequences:,} sequences, {bounds:,} document bounds)"
                f" makes {expected:,}",
                hint="the file is truncated or was changed; make the data set anew",
            )
        return code, sequences, bounds

    def _check_index(
        self, all_lengths: npt.NDArray[np.int32], pointers: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64]
    ) -> None:
        width, expected = self.dtype.itemsize, 0
        for start in range(0, len(self), CHUNK):
            lengths = all_lengths[start : start + CHUNK].astype(np.int64)
            if lengths.min() < 0:
                raise DataError(f"{self._idx}: sequence {start + lengths.argmin()} has {lengths.min()} tokens")
            ends = expected + np.cumsum(lengths) * width
            wrong = np.flatnonzero(pointers[start : start + CHUNK] != ends - lengths * width)
            if wrong.size:
                i = int(wrong[0])
                raise DataError(
                    f"{self._idx}: sequence {start + i} is said to begin at byte {pointers[start + i]} of the"
                    f" .bin, but the lengths before it end at {ends[i] - lengths[i] * width}"
                )
            expected = int(ends[-1])
        if self._size != expected:
            raise self._other_size(expected)
        if not bounds.size or bounds[0] != 0 or bounds[-1] != len(self) or np.any(bounds[1:] < bounds[:-1]):
            raise self._wrong_documents()

    def __len__(self) -> int:
        """Number of sequences."""
        return self._sequences

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits of the content: the whole index, and 64 blocks of 4 KiB spread over the tokens.

        It does not depend on names, folders or times. Tokens regenerated in place almost always change it, at the cost
        of reading the index once; an edit of a few tokens between the blocks does not show.
        """
        digest = xxhash.xxh3_128(f"{self.dtype.str} {self.num_tokens}".encode())
        for start in range(0, len(self), CHUNK):
            digest.update(np.ascontiguousarray(self.lengths[start : start + CHUNK]).data)
        digest.update(np.ascontiguousarray(self.document_index).data)
        block = 4096 // self.dtype.itemsize
        for start in np.linspace(0, max(self.num_tokens - block, 0), 64).astype(np.int64):
            digest.update(np.ascontiguousarray(self.tokens[start : start + block]).data)
        self.close()
        return digest.hexdigest()

    def read(self, i: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Tokens [offset, offset + length) of sequence `i`, to its end without a length; a read-only view."""
        start = int(self.pointers[i]) // self.dtype.itemsize
        end = start + (int(self.lengths[i]) if length is None else offset + length)
        return self.tokens[start + offset : end]
