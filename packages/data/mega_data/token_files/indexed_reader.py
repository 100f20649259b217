"""Token files in Megatron's indexed format: `PREFIX.bin` holds the tokens, `PREFIX.idx` the position of each sequence.

The `.bin` is every sequence's tokens one after another, little-endian, without a header. The `.idx` is a header of 34
bytes (magic 9, version u64, dtype code u8, sequence count S u64, length D of the document index u64), then S int32
lengths in tokens, S int64 byte pointers, D int64 document bounds (0, then the sequence count after each document) and
optionally S int8 modes, which only multimodal data has. Everything is little-endian.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import resource
import struct
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.bounded_parsing import refuse_lfs_pointer
from mega_common.errors import DataError
from mega_data.token_files.remote_copies import resolve_local_prefix

Tokens = npt.NDArray[np.integer[Any]]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
CHUNK = 1 << 22


def select_token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return Megatron's type of token ids for a vocabulary: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2" if vocab_size < 65_500 else "<i4")


def strip_data_suffix(path: Path) -> Path:
    """Return a data set's prefix for the path of its `.bin` or `.idx`; other paths unchanged.
    The prefix of `wiki.bin` is `wiki`, unless `wiki.bin.idx` exists.
    """
    meant = path.suffix in (".bin", ".idx") and not path.with_name(path.name + ".idx").exists()
    return path.with_suffix("") if meant else path


def get_bin_path(prefix: Path) -> Path:
    """Return `PREFIX.bin`, the token file of a data set."""
    prefix = strip_data_suffix(prefix)
    return prefix.with_name(prefix.name + ".bin")


def get_idx_path(prefix: Path) -> Path:
    """Return `PREFIX.idx`, the index file of a data set."""
    prefix = strip_data_suffix(prefix)
    return prefix.with_name(prefix.name + ".idx")


def get_loss_mask_prefix(prefix: Path) -> Path:
    """Return `PREFIX.mask`, the prefix of the data set that stores the loss mask of another data set.
    It has one byte per token of the data set at `prefix`: the token's weight in the loss.
    """
    prefix = strip_data_suffix(prefix)
    return prefix.with_name(prefix.name + ".mask")


def get_images_prefix(prefix: Path) -> Path:
    """Return `PREFIX.images`, the prefix of the data set that stores image references of another data set.
    It stores the image references of each document of the data set at `prefix`.
    """
    prefix = strip_data_suffix(prefix)
    return prefix.with_name(prefix.name + ".images")


def list_companion_files(prefix: Path) -> dict[str, Path]:
    """Return {name while being written: final path} of the mask and image files of a data set."""
    mask, images = get_loss_mask_prefix(prefix), get_images_prefix(prefix)
    return {
        "mask.bin": get_bin_path(mask), "mask.idx": get_idx_path(mask), "images.bin": get_bin_path(images), "images.idx": get_idx_path(images),
    }  # fmt: skip


@contextlib.contextmanager
def _translate_read_errors(prefix: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        limit_hint = "each data set opens two files: raise the limit (ulimit -Hn), or merge some with mega data merge"
        hint = limit_hint if error.errno == errno.EMFILE else None
        raise DataError(f"{prefix}: cannot be read ({error.strerror})", hint=hint) from error


class OpenReaderPool:
    """Pool that keeps the files of the `limit` most recently opened data sets open and closes others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._readers: deque[IndexedReader] = deque()

    def register_reader(self, reader: IndexedReader) -> None:
        """Register a data set reader that was just opened; close the one opened first if there are more than `limit`."""
        self._readers.append(reader)
        while len(self._readers) > self._limit:
            self._readers.popleft().close()


class MappedArrays(NamedTuple):
    """Memory-mapped arrays of a data set's two files."""

    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    document_index: npt.NDArray[np.int64]
    tokens: Tokens


class IndexedReader:
    """Memory-mapped reader of a token data set of S sequences (Megatron's `.bin` and `.idx`).
    The whole index is checked against the files on opening.

    With `files`, opening reads only the header, the sizes and the ends of the index, in a few small reads; the files
    are mapped, and checked once, on the first access, and closed again when `files` opens others. A URL is downloaded
    first (`resolve_local_prefix`).

    Attributes:
        documents: number of documents.
        num_tokens: number of tokens of all sequences.

    Raises:
        DataError: naming the file, what was expected and what was found.
    """

    def __init__(self, prefix: Path, files: OpenReaderPool | None = None) -> None:
        self.prefix = strip_data_suffix(resolve_local_prefix(Path(prefix)))
        self._bin, self._idx, self._files = get_bin_path(self.prefix), get_idx_path(self.prefix), files
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise DataError(f"{path}: no such file", hint=self._suggest_prefixes())
        with _translate_read_errors(self.prefix):
            code, self._sequences, bounds = self._read_header()
            self._size = self._bin.stat().st_size
        self._bounds, self.documents, self.dtype = bounds, max(0, bounds - 1), np.dtype(DTYPES[code])
        self.num_tokens = self._size // self.dtype.itemsize
        self._arrays: MappedArrays | None = None
        self._checked = False
        self._companions: dict[Path, IndexedReader] = {}
        if files is None:
            self.check_index()
        else:
            self._check_ends()

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Number of tokens of each sequence, int32 [sequences]."""
        return self._get_arrays().lengths

    @property
    def pointers(self) -> npt.NDArray[np.int64]:
        """Byte position of each sequence in the `.bin`, int64 [sequences]."""
        return self._get_arrays().pointers

    @property
    def document_index(self) -> npt.NDArray[np.int64]:
        """Number of the first sequence of each document, then the number of sequences: int64 [documents + 1]."""
        return self._get_arrays().document_index

    @property
    def tokens(self) -> Tokens:
        """All tokens of the data set, one sequence after another: [num_tokens] in `dtype`, memory-mapped."""
        return self._get_arrays().tokens

    @property
    def index_bytes(self) -> int:
        """Size in bytes of the `.idx`, which `check_index` reads."""
        return HEADER.size + 12 * self._sequences + 8 * (self.documents + 1)

    def check_index(self) -> None:
        """Raise DataError if the index and the token file do not fit each other; they are compared at most once.

        Raises:
            DataError: see the class.
        """
        self._get_arrays()

    def find_token_position(self, i: int) -> int:
        """Return the number of tokens before sequence `i` (all tokens for i = number of sequences).
        If the files are not mapped, it takes one small read.
        """
        if i in (0, self._sequences):
            return self.num_tokens if i else 0
        if self._arrays is not None:
            return int(self.pointers[i]) // self.dtype.itemsize
        (pointer,) = self._read_struct(HEADER.size + 4 * self._sequences + 8 * i, "<q")
        return int(pointer) // self.dtype.itemsize

    def open_companion(self, prefix: Path) -> IndexedReader:
        """Return a reader of token files with a value for each token of these, such as the loss mask; opened once."""
        if prefix not in self._companions:
            self._companions[prefix] = IndexedReader(prefix)
        return self._companions[prefix]

    def close(self) -> None:
        """Release the mapped files and memory of this data set until the next access, which maps them again."""
        self._arrays = None

    def _get_arrays(self) -> MappedArrays:
        arrays = self._arrays
        if arrays is None:
            arrays = self._arrays = self._map_arrays()
            if self._files is not None:
                self._files.register_reader(self)
        return arrays

    def _map_arrays(self) -> MappedArrays:
        if not self._checked:
            self._check_index(*self._map_index())
            self._checked = True
        index = self._map_index()  # a new mapping, so that the pages read by the check are released
        with _translate_read_errors(self.prefix):
            mapped: Tokens = np.memmap(self._bin, self.dtype, "r") if self._size else np.empty(0, self.dtype)
        return MappedArrays(*index, np.asarray(mapped))  # a plain array: slices of a memmap are slower

    def _map_index(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        with _translate_read_errors(self.prefix):
            raw = np.memmap(self._idx, np.uint8, "r")
        at, sequences = HEADER.size, self._sequences
        return (
            np.frombuffer(raw, "<i4", sequences, at),
            np.frombuffer(raw, "<i8", sequences, at + 4 * sequences),
            np.frombuffer(raw, "<i8", self._bounds, at + 12 * sequences),
        )

    def _read_struct(self, offset: int, form: str) -> tuple[Any, ...]:
        with _translate_read_errors(self.prefix), open(self._idx, "rb", buffering=0) as stream:
            return struct.unpack(form, os.pread(stream.fileno(), struct.calcsize(form), offset))

    def _check_ends(self) -> None:
        """Check that the last sequence ends with the `.bin`, and the documents with the sequences."""
        last, end, at = 0, 0, HEADER.size
        if self._sequences:
            (length,) = self._read_struct(at + 4 * self._sequences - 4, "<i")
            (last,) = self._read_struct(at + 12 * self._sequences - 8, "<q")
            end = last + length * self.dtype.itemsize
        if end != self._size:
            raise self._size_error(end)
        if self._bounds and self._read_struct(at + 12 * self._sequences + 8 * (self._bounds - 1), "<q") != (
            self._sequences,
        ):
            raise self._document_index_error()

    def _size_error(self, expected: int) -> DataError:
        return DataError(
            f"{self._bin}: has {self._size:,} bytes, but {self._idx.name} requires {expected:,}",
            hint="the two files are of different runs, or one is truncated; build or copy the data set again",
        )

    def _document_index_error(self) -> DataError:
        return DataError(f"{self._idx}: the document index must rise from 0 to the {len(self)} sequences, and does not")

    def _suggest_prefixes(self) -> str:
        """Return a hint with data sets nearby, because Megatron's tools append `_text_document` to the given name."""
        if inside := sorted(str(path.with_suffix("")) for path in self.prefix.glob("*.idx")):
            return f"{self.prefix} is a folder; give the prefix of a data set in it: {', '.join(inside[:8])}"
        if self.prefix.suffix in (".yaml", ".yml") and self.prefix.is_file():
            return (
                f"{self.prefix} is a file of settings; give the prefix of a data set that it names, such as data/train"
            )
        if self.prefix.is_file():
            output = self.prefix.with_suffix("")
            return (
                f"{self.prefix} is a file of records, not token files; tokenize it with mega data preprocess --input"
                f" {self.prefix} --tokenizer FOLDER --output {output}, then give {output}"
            )
        files = [path.name for path in self.prefix.parent.glob("*.y*ml")]
        if meant := difflib.get_close_matches(self.prefix.name, files, n=1, cutoff=0.8):
            return f"did you mean the file {self.prefix.with_name(meant[0])}?"
        names = sorted(path.name.removesuffix(".idx") for path in self.prefix.parent.glob("*.idx"))
        names = [name for name in names if not name.endswith(".mask")]
        near = [name for name in names if name.startswith(self.prefix.name)] or names
        if near:
            near = difflib.get_close_matches(self.prefix.name, near, n=8, cutoff=0) + ["..."] * (len(near) > 8)
            return f"data sets in {self.prefix.parent}: {', '.join(near)}"
        if self.prefix.is_dir():
            return f"{self.prefix} is a folder without data sets; create one with mega data preprocess --output PREFIX"
        return f"create it with mega data preprocess --input FILE --tokenizer FOLDER --output {self.prefix}"

    def _read_header(self) -> tuple[int, int, int]:
        """Return dtype code, sequence count and length of the document index."""
        size = self._idx.stat().st_size
        with open(self._idx, "rb") as stream:
            head = stream.read(HEADER.size)
        refuse_lfs_pointer(self._idx, DataError, head)
        if not head.startswith(MAGIC):
            raise DataError(f"{self._idx}: is not an index of token files: it begins with {head[:9]!r}, not {MAGIC!r}")
        if len(head) < HEADER.size:
            raise DataError(f"{self._idx}: is truncated to {size} bytes; the header alone has {HEADER.size}")
        _, version, code, sequences, bounds = HEADER.unpack(head)
        if version != 1:
            raise DataError(f"{self._idx}: has format version {version}; only version 1 is supported")
        if code not in DTYPES:
            found = f"{FLOATS[code]}, not a token dtype" if code in FLOATS else "unknown"
            raise DataError(f"{self._idx}: dtype code {code} is {found}; expected one of {sorted(DTYPES)}")
        expected = HEADER.size + 12 * sequences + 8 * bounds
        if size not in (expected, expected + sequences):
            raise DataError(
                f"{self._idx}: has {size:,} bytes, but its header ({sequences:,} sequences, {bounds:,} document bounds)"
                f" requires {expected:,}",
                hint="the file is truncated or was changed; build or copy the data set again",
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
                    f"{self._idx}: sequence {start + i} begins at byte {pointers[start + i]} of the .bin, but the"
                    f" sequences before it end at byte {ends[i] - lengths[i] * width}"
                )
            expected = int(ends[-1])
        if self._size != expected:
            raise self._size_error(expected)
        if not bounds.size or bounds[0] != 0 or bounds[-1] != len(self) or np.any(bounds[1:] < bounds[:-1]):
            raise self._document_index_error()

    def __len__(self) -> int:
        """Return the number of sequences of the data set."""
        return self._sequences

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint (32 hex digits) of the data set's index and of 64 blocks of 4 KiB spread over its tokens.

        It does not depend on names, folders or times. Regenerated tokens almost always change it, at the cost of
        reading the index once; an edit of a few tokens between the blocks is not detected.
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

    def read_sequence(self, i: int, offset: int = 0, length: int | None = None) -> Tokens:
        """Return the tokens [offset, offset + length) of sequence `i`, by default to its end, as a read-only view."""
        start = int(self.pointers[i]) // self.dtype.itemsize
        end = start + (int(self.lengths[i]) if length is None else offset + length)
        return self.tokens[start + offset : end]


RESERVED_FILES = 512  # for the rest of the process: libraries, sockets, logs


def raise_open_files_limit(count: int) -> int:
    """Raise this process's limit of open files so that it can open `count` more, and return how many it can open.

    It is raised as far as the system allows without extra rights.

    Returns:
        `count`, or fewer if the system allows fewer, at least 16.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = count + RESERVED_FILES
    if soft == resource.RLIM_INFINITY or soft >= required:
        return count
    allowed = required if hard == resource.RLIM_INFINITY else min(required, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS reports no limit and has one
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    return max(16, min(count, soft - RESERVED_FILES))
