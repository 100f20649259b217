"""Files of `torch.save`, opened without loading them: zip archives with one pickle and one uncompressed entry per
storage, and the format before torch 1.6.

Tensors are mapped and read on use, also in an archive within a larger file. Pickles are loaded with
`safe_pickles.load_untrusted_pickle`. Format: pytorch.org/docs/stable/notes/serialization.html.

A file of torch before 1.6 is five pickles in a row (a magic number, the version, facts about the machine, the state, the
storages' keys), followed by each storage: its length in eight bytes, and its elements.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from mega_ckpt.formats.safe_pickles import MAX_PICKLE_BYTES, PickledObjectPlaceholder, load_untrusted_pickle
from mega_ckpt.storage import mmap_file_range
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.bounded_parsing import refuse_lfs_pointer
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
    """A tensor in a `torch.save` archive, not yet read.
    `path[begin:end]` is its storage; the tensor starts at element `start`, with strides.
    """

    path: Path
    dtype: torch.dtype
    shape: TensorShape
    stride: TensorShape
    start: int
    begin: int
    end: int

    def read(self) -> Tensor:
        """Read the tensor as a private memory map of the file: bytes are read when they are used."""
        size = self.dtype.itemsize
        last = self.start + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True)) + 1
        if not math.prod(self.shape):
            return torch.empty(self.shape, dtype=self.dtype)
        with open(self.path, "rb") as file:
            data = mmap_file_range(file, self.begin + self.start * size, self.begin + last * size)
        aligned = data if self.begin % size == 0 else data.clone()
        return aligned.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class StorageRange:
    """Bytes [begin, end) of a file, the storage of tensors of one dtype."""

    dtype: torch.dtype
    begin: int
    end: int


class _FileRange(io.RawIOBase):
    """Bytes [begin, end) of a file as a raw stream."""

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
    """Reader that never allocates more than the rest of the file, even if a larger length is requested."""

    def __init__(self, part: _FileRange, size: int) -> None:
        super().__init__(part)
        self._bytes = size

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._bytes - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def open_file_range(file: IO[bytes], begin: int, end: int) -> IO[bytes]:
    """Return bytes [begin, end) of `file` as a read-only file object."""
    return _BoundedReader(_FileRange(file, begin, end), end - begin)


def load_torch_archive(path: Path, begin: int = 0, end: int | None = None) -> Any:
    """Load the content of a `torch.save` archive without running code in it; tensors become unread `StoredTensor`s.
    The archive is `path[begin:end]`. The result has containers, `PickledObjectPlaceholder` placeholders, and `StoredTensor`s for
    tensors.

    Raises:
        CheckpointError: when it is no such archive, is damaged, has a function or class that is not allowed, or a tensor
            that exceeds the file.
    """
    try:
        refuse_lfs_pointer(path, CheckpointError)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            end = size if end is None else end
            if not 0 <= begin <= end <= size:
                raise CheckpointError(f"{path}: has {size} bytes instead of {end}", hint="copy the file again")
            return _load_zip(path, file, begin, end)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None


def _load_zip(path: Path, file: IO[bytes], begin: int, end: int) -> Any:
    try:
        with zipfile.ZipFile(open_file_range(file, begin, end)) as archive:
            entries = {info.filename.split("/", 1)[-1]: info for info in archive.infolist()}
            info = entries["data.pkl"]
            if (
                max(info.file_size, info.compress_size) > min(MAX_PICKLE_BYTES, end - begin)
                or info.compress_type != zipfile.ZIP_STORED
            ):
                raise CheckpointError(
                    f"{path}: its pickle must be smaller than the file of {end - begin:,} bytes, not {info.file_size:,} bytes"
                )
            pickled = archive.read(info)
    except (zipfile.BadZipFile, KeyError, struct.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: damaged, or not written by torch.save ({error})",
            hint="copy the file again; if it was written by torch before 1.6, save it again with a newer version",
        ) from None
    storages = _Storages(file, begin, end, entries)
    return load_untrusted_pickle(pickled, str(path), replace=tensor_rebuilders(path), stored=storages.find_storage)


def tensor_rebuilders(path: Path) -> dict[str, Any]:
    """Return the functions that rebuild the tensors of a pickle as `StoredTensor`s in `path`.
    They are for the argument `replace` of `load_untrusted_pickle`.
    """

    def rebuild_tensor(
        storage: StorageRange, start: int, shape: TensorShape, stride: TensorShape, *others: Any
    ) -> StoredTensor:
        return _stored_tensor(path, storage, start, shape, stride, *others)

    return {
        "torch._utils._rebuild_tensor": rebuild_tensor,
        "torch._utils._rebuild_tensor_v2": rebuild_tensor,
        "torch._utils._rebuild_tensor_v3": rebuild_tensor,
        "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
        "torch._tensor._rebuild_from_type_v2": lambda rebuild, kind, args, state: rebuild(*args),  # with attributes
    }


def _stored_tensor(
    path: Path, storage: StorageRange, start: int, shape: TensorShape, stride: TensorShape, *others: Any
) -> StoredTensor:
    """Return a tensor of a storage; `others` are requires_grad, hooks and, for types without a storage class, the
    dtype.
    """
    named = others[2] if len(others) > 2 and getattr(others[2], "name", "").startswith("torch.") else None
    dtype = getattr(torch, named.name.removeprefix("torch.")) if named else storage.dtype
    shape, stride = tuple(shape), tuple(stride)
    integers = all(isinstance(n, int) and n >= 0 for n in (start, *shape, *stride))
    last = start + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1
    count, capacity = math.prod(shape), (storage.end - storage.begin) // dtype.itemsize
    if not integers or (count and max(last, count) > capacity):
        raise ValueError(f"a tensor of shape {list(shape)} does not fit its storage")
    return StoredTensor(path, dtype, shape, stride, start, storage.begin, storage.end)


def storage_dtype(marker: PickledObjectPlaceholder) -> torch.dtype:
    """Return the element dtype of the torch storage class that a pickle names, such as FloatStorage.

    Raises:
        KeyError: when it is not a storage class.
    """
    return _STORAGES[marker.name.rpartition(".")[2]]


class _Storages:
    """Storages of an archive."""

    def __init__(self, file: IO[bytes], begin: int, end: int, entries: dict[str, zipfile.ZipInfo]) -> None:
        self._file, self._begin, self._end, self._entries = file, begin, end, entries

    def find_storage(self, pid: Any) -> StorageRange:
        """Return the byte range of a storage in the file."""
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
            raise ValueError(f"storage {key} exceeds the file")
        return StorageRange(dtype, first, first + info.file_size)


def namespace_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a pickled `argparse.Namespace`; empty for anything else."""
    return dict(value.state) if isinstance(value, PickledObjectPlaceholder) and isinstance(value.state, dict) else {}


_MAGIC = 0x1950A86A20F9469CFC6C
_COUNT = 8  # bytes before a storage's elements


def load_state_tensors(path: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of a `torch.save`d state dict, in file order, without reading their data.
    The state dict is {name: tensor}, such as `pytorch_model.bin`.

    Raises:
        CheckpointError: when the file is damaged, is not a state dict, or has a function or class that is not allowed.
    """
    try:
        state = load_torch_archive(path) if zipfile.is_zipfile(path) else _load_legacy_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, StoredTensor) for name, tensor in state.items()
    ):
        raise CheckpointError(f"{path}: must be a state dict of a model ({{name: tensor}})")
    return dict(state)


def _load_legacy_file(path: Path) -> Any:
    refuse_lfs_pointer(path, CheckpointError)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        stream = open_file_range(file, 0, min(size, MAX_PICKLE_BYTES))
        found: dict[str, StorageRange] = {}

        def load_next(storages: Callable[[Any], StorageRange]) -> Any:
            return load_untrusted_pickle(stream, str(path), replace=tensor_rebuilders(path), stored=storages)

        def record_storage(pid: Any) -> StorageRange:
            _, marker, key, _, count, view = pid
            if view is not None:
                raise ValueError(f"storage {key} is a view of another one, which is not supported")
            dtype = storage_dtype(marker)
            return found.setdefault(key, StorageRange(dtype, 0, count * dtype.itemsize))

        if load_next(record_storage) != _MAGIC:
            raise CheckpointError(f"{path}: not a file of torch.save", hint="download the file again")
        _version, _machine, begin = load_next(record_storage), load_next(record_storage), stream.tell()
        _state, keys, end = load_next(record_storage), load_next(record_storage), stream.tell()
        # The state is read twice: the byte ranges of its storages follow from the first reading.
        ranges = _locate_storages(path, file, found, keys, end, size)
        stream.seek(begin)
        return load_next(lambda pid: ranges[pid[2]])


def _locate_storages(
    path: Path, file: IO[bytes], found: Mapping[str, StorageRange], keys: Any, at: int, size: int
) -> dict[str, StorageRange]:
    """Return the byte ranges of the storages, which follow each other from byte `at`."""
    ranges = {}
    for key in keys if isinstance(keys, list) else ():
        file.seek(at)
        count, begin = int.from_bytes(file.read(_COUNT), "little"), at + _COUNT
        if key not in found or count * found[key].dtype.itemsize != found[key].end:
            raise CheckpointError(f"{path}: damaged: the length of storage {key!r} conflicts with its tensors")
        at = begin + found[key].end
        if at > size:
            raise CheckpointError(f"{path}: truncated: {size} bytes instead of {at}", hint="copy the file again")
        ranges[key] = StorageRange(found[key].dtype, begin, at)
    if found.keys() - ranges.keys():
        raise CheckpointError(f"{path}: damaged: a storage of its tensors is missing")
    return ranges
