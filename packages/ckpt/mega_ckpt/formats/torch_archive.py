"""Archives of `torch.save`, opened without loading them: a zip file with one pickle and one uncompressed entry a storage.

The tensors are mapped, so that reading one costs its own bytes, wherever in a larger file the archive lies. The pickle goes
through `pickles.load_pickle`. Format: pytorch.org/docs/stable/notes/serialization.html.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from mega_ckpt.formats.pickles import MAX_PICKLE_BYTES, Inert, load_pickle
from mega_ckpt.pieces import Shape
from mega_ckpt.storage import mapped
from mega_common.errors import CheckpointError

_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}  # fmt: skip
_LOCAL_HEADER = 30  # bytes before the name


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `path[begin:end]` is its storage, of which it is elements `start`, strided."""

    path: Path
    dtype: torch.dtype
    shape: Shape
    stride: Shape
    start: int
    begin: int
    end: int

    def read(self) -> Tensor:
        """The tensor as a private mapping of the file: bytes are read when they are used."""
        size = self.dtype.itemsize
        last = self.start + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) + 1
        if not math.prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        with open(self.path, "rb") as file:
            data = mapped(file, self.begin + self.start * size, self.begin + last * size)
        aligned = data if self.begin % size == 0 else data.clone()
        return aligned.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Storage:
    """Bytes [begin, end) of a file as elements of one dtype."""

    dtype: torch.dtype
    begin: int
    end: int


class _Part(io.RawIOBase):
    """Bytes [begin, end) of a file as a file."""

    def __init__(self, file: IO[bytes], begin: int, end: int) -> None:
        self._file, self._begin, self._size, self._at = file, begin, end - begin, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._begin + self._at)
        data = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _BoundedReader(io.BufferedReader):
    """Reader that allocates no more than is left of the file, whatever length is asked for."""

    def __init__(self, part: _Part, size: int) -> None:
        super().__init__(part)
        self._bytes = size

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._bytes - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def part_of(file: IO[bytes], begin: int, end: int) -> IO[bytes]:
    """Bytes [begin, end) of a file as a file."""
    return _BoundedReader(_Part(file, begin, end), end - begin)


def load_archive(path: Path, begin: int = 0, end: int | None = None) -> Any:
    """What `torch.save` put into `path[begin:end]`: containers, `Inert` stand-ins, and `StoredTensor`s for tensors.

    Raises:
        CheckpointError: when it is no such archive, is damaged, asks for a function or class that no checkpoint needs, or
            has a tensor that reaches outside its file.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = size if end is None else end
            if not 0 <= begin <= end <= size:
                raise CheckpointError(f"{path}: {size} bytes long, but {end} are expected", hint="copy the file again")
            return _load(path, file, begin, end)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None


def _load(path: Path, file: IO[bytes], begin: int, end: int) -> Any:
    try:
        with zipfile.ZipFile(part_of(file, begin, end)) as archive:
            entries = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
            info = entries["data.pkl"]
            if (
                max(info.file_size, info.compress_size) > min(MAX_PICKLE_BYTES, end - begin)
                or info.compress_type != zipfile.ZIP_STORED
            ):
                raise CheckpointError(
                    f"{path}: its pickle states {info.file_size:,} bytes, which a checkpoint of {end - begin:,} bytes does not have"
                )
            pickled = archive.read(info)
    except (zipfile.BadZipFile, KeyError, struct.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: damaged, or not written by torch.save ({error})",
            hint="is it of torch older than 1.6? save it again",
        ) from None
    storages = _Storages(file, begin, end, entries)
    return load_pickle(pickled, str(path), replace=rebuilding(path), stored=storages.find)


def rebuilding(path: Path) -> dict[str, Any]:
    """What `load_pickle` is to replace, so that what it reads of tensors becomes `StoredTensor`s in `path`."""

    def tensor(storage: Storage, start: int, shape: Shape, stride: Shape, *others: Any) -> StoredTensor:
        return _tensor(path, storage, start, shape, stride, *others)

    return {
        "torch._utils._rebuild_tensor": tensor,
        "torch._utils._rebuild_tensor_v2": tensor,
        "torch._utils._rebuild_tensor_v3": tensor,
        "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
        "torch._tensor._rebuild_from_type_v2": lambda rebuild, kind, args, state: rebuild(*args),  # with attributes
    }


def _tensor(path: Path, storage: Storage, start: int, shape: Shape, stride: Shape, *others: Any) -> StoredTensor:
    """A tensor of a storage; `others` are requires_grad, hooks and, for types without a storage class, the dtype."""
    named = others[2] if len(others) > 2 and getattr(others[2], "name", "").startswith("torch.") else None
    dtype = getattr(torch, named.name.removeprefix("torch.")) if named else storage.dtype
    shape, stride = tuple(shape), tuple(stride)
    whole = all(isinstance(n, int) and n >= 0 for n in (start, *shape, *stride))
    last = start + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
    count, room = math.prod(shape), (storage.end - storage.begin) // dtype.itemsize
    if not whole or (count and max(last, count) > room):
        raise ValueError(f"a tensor of shape {list(shape)} does not fit its storage")
    return StoredTensor(path, dtype, shape, stride, start, storage.begin, storage.end)


def storage_dtype(marker: Inert) -> torch.dtype:
    """What the class of a storage, as a pickle names it, says of its elements.

    Raises:
        KeyError: when it is none.
    """
    return _STORAGES[marker.name.rpartition(".")[2]]


class _Storages:
    """The storages of an archive."""

    def __init__(self, file: IO[bytes], begin: int, end: int, entries: dict[str, zipfile.ZipInfo]) -> None:
        self._file, self._begin, self._end, self._entries = file, begin, end, entries

    def find(self, pid: Any) -> Storage:
        """A storage's place in the file."""
        kind, marker, key, _, count = pid
        if kind != "storage":
            raise ValueError(f"{kind!r} is not a storage")
        dtype, info = storage_dtype(marker), self._entries[f"data/{key}"]
        self._file.seek(self._begin + info.header_offset)
        header = self._file.read(_LOCAL_HEADER)
        name, extra = struct.unpack("<HH", header[26:30])
        first = self._begin + info.header_offset + _LOCAL_HEADER + name + extra
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != count * dtype.itemsize:
            raise ValueError(f"storage {key} has {info.file_size} bytes for {count} elements")
        if first + info.file_size > self._end:
            raise ValueError(f"storage {key} reaches outside the file")
        return Storage(dtype, first, first + info.file_size)


def namespace(value: Any) -> dict[str, Any]:
    """The attributes of a pickled `argparse.Namespace`; empty for anything else."""
    return dict(value.state) if isinstance(value, Inert) and isinstance(value.state, dict) else {}
