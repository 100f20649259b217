"""GGUF files (github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata, and tensors that are dequantized as they
are read.

The package `gguf` reads the format and decodes each quantized type. They are decoded to fp32, which is exact; MXFP4 to
bf16, which is exact as well. Unquantized tensors keep their dtype.

Layout: magic, version, number of tensors, number of metadata keys; each key with its typed value; each tensor's name,
dimensions, type and offset. Every integer is little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mega_ckpt.formats.disk_source import LazyTensor
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.bounded_parsing import explain_read_error, refuse_lfs_pointer
from mega_common.errors import CheckpointError, MissingPackageError

MAX_ELEMENTS = 1 << 22  # of all metadata arrays; a vocabulary of 262,144 tokens needs about 1.3 million
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_ELEMENTS_PER_BYTE = 8  # every GGML type stores at least one bit per element
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of scalar types
_STRING, _ARRAY = 8, 9


def check_gguf_header(path: Path) -> None:
    """Raise `ValueError` unless the counts, lengths and dimensions in a GGUF file's header fit its size.

    Raises:
        ValueError: naming the count that does not fit.
        OSError: when the file cannot be read.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _HeaderCursor(data).check_all()


class _HeaderCursor:
    """Cursor over the header of a mapped GGUF file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._size, self._at, self._elements = data, len(data), 0, 0

    def check_all(self) -> None:
        """Check the counts, lengths and dimensions in the whole header of a GGUF file.

        Raises:
            ValueError: at the first count that does not fit the file.
        """
        if self._size < 24 or self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with a GGUF header")
        self._at = 4
        if (version := self._integer("I")) & 0xFFFF == 0:
            raise ValueError("it is big-endian")
        if version not in (2, 3):
            raise ValueError(f"its version must be 2 or 3, not {version}")
        tensors, keys = self._integer("Q"), self._integer("Q")
        self._require(keys, 13, "metadata keys")  # length of the name, type, one byte
        for _ in range(keys):
            key = self._string("the name of a metadata key")
            self._value(self._integer("I"), key)
        self._require(tensors, 32, "tensors")  # length of the name, dimensions (at least one), type, offset
        for _ in range(tensors):
            self._tensor(self._string("the name of a tensor"))

    def _integer(self, form: str) -> int:
        size = struct.calcsize("<" + form)
        if self._at + size > self._size:
            raise ValueError("it ends within its header")
        (value,) = struct.unpack_from("<" + form, self._data, self._at)
        self._at += size
        return int(value)

    def _require(self, count: int, size: int, what: str) -> None:
        """Require space in the rest of the file for `count` items of at least `size` bytes."""
        left = self._size - self._at
        if count * size > left:
            raise ValueError(f"it states {count:,} {what}, but only {left:,} bytes are left")

    def _string(self, what: str) -> str:
        length = self._integer("Q")
        self._require(length, 1, f"bytes in {what}")
        start, self._at = self._at, self._at + length
        return self._data[start : start + min(length, 200)].decode(errors="replace")

    def _value(self, kind: int, key: str, depth: int = 0) -> None:
        if kind == _STRING:
            length = self._integer("Q")
            self._require(length, 1, f"bytes in {key}")
            self._at += length
        elif kind == _ARRAY and depth < 2:
            self._array(key, depth + 1)
        elif kind in _SIZES:
            self._require(1, _SIZES[kind], f"value of {key}")
            self._at += _SIZES[kind]
        else:
            raise ValueError(f"the type {kind} of {key} is not supported")

    def _array(self, key: str, depth: int) -> None:
        kind, count = self._integer("I"), self._integer("Q")
        least = _SIZES.get(kind, 8 if kind == _STRING else 12)
        self._require(count, least, f"elements in {key}")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise ValueError(f"its metadata arrays have more than {MAX_ELEMENTS:,} elements ({key})")
        if kind in _SIZES:
            self._at += count * least
            return
        for _ in range(count):
            self._value(kind, key, depth)

    def _tensor(self, name: str) -> None:
        axes = self._integer("I")
        if not 1 <= axes <= MAX_DIMENSIONS:
            raise ValueError(f"{name} must have 1 to {MAX_DIMENSIONS} dimensions, not {axes:,}")
        shape = [self._integer("Q") for _ in range(axes)]
        if 0 in shape or math.prod(shape) > _ELEMENTS_PER_BYTE * self._size:
            raise ValueError(f"{name} has the dimensions {shape}, which do not fit in a file of {self._size:,} bytes")
        self._integer("I")
        if (offset := self._integer("Q")) >= self._size:
            raise ValueError(f"{name} begins at byte {offset:,} of the tensors, beyond the end of the file")


if TYPE_CHECKING:
    from gguf import ReaderTensor

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 18  # elements that are decoded at once


@dataclass(frozen=True)
class GgufModel:
    """Contents of the GGUF file, or the split files, of one model.

    Attributes:
        path: the first file.
        metadata: {key: value}, with floats as the shortest decimal that rounds to the file's fp32.
        tensors: {name: tensor}, in shapes (out, in).
        quantization: number of tensors of each quantized type, as text; None without quantized tensors.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    quantization: str | None


def is_gguf_file(path: Path) -> bool:
    """Return whether `path` is a GGUF file, judged by its name."""
    return path.suffix == SUFFIX and path.is_file()


def open_gguf_model(path: Path) -> GgufModel:
    """Open the model in the GGUF file `path`, or in all split files if `path` is one of them.

    Raises:
        CheckpointError: when a file is missing, damaged or not of this format, or has a type that cannot be decoded.
        MissingPackageError: when the package gguf is not installed.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, LazyTensor] = {}
    kinds: Counter[str] = Counter()
    for part in _split_files(path):
        part_metadata, part_tensors = _read_gguf(part)
        metadata = {**part_metadata, **metadata}
        for tensor in part_tensors:
            kinds[tensor.tensor_type.name] += 1
            tensors[tensor.name] = _lazy_gguf_tensor(part, tensor)
    quantized = [f"{count} of {kind}" for kind, count in sorted(kinds.items()) if kind not in _PLAIN]
    description = f"GGUF, {', '.join(quantized)} among {sum(kinds.values())} tensors" if quantized else None
    return GgufModel(path, metadata, tensors, description)


def _split_files(path: Path) -> list[Path]:
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    paths = [path.with_name(f"{found[1]}-{n + 1:05d}-of-{found[3]}.gguf") for n in range(int(found[3]))]
    for one in paths:
        if not one.is_file():
            raise CheckpointError(f"{one}: missing; {path.name} is one part of the model", hint="download all parts")
    return paths


def _read_gguf(path: Path) -> tuple[dict[str, Any], list[ReaderTensor]]:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingPackageError(
            f"{path}: GGUF files require the package gguf, which is not installed",
            hint="in the root of the repository: pip install 'packages/ckpt[gguf]'",
        ) from None

    class ArrayGgufReader(GGUFReader):
        """GGUFReader with a plain array instead of numpy's memmap, whose slices cost microseconds each."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)

    try:
        refuse_lfs_pointer(path, CheckpointError)
        check_gguf_header(path)
        reader = ArrayGgufReader(path, "c")  # copy-on-write, since torch requires writable memory
        if reader.byte_order != "I":
            raise ValueError("it is big-endian")
        metadata = {key: _shortest_decimal(field.contents()) for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        raise CheckpointError(
            f"{path}: damaged, or not a supported GGUF file ({explain_read_error(error)})",
            hint="download or copy the file again",
        ) from None
    return metadata, reader.tensors


def _shortest_decimal(value: Any) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _lazy_gguf_tensor(path: Path, tensor: ReaderTensor) -> LazyTensor:
    from gguf.quants import _type_traits

    kind = tensor.tensor_type
    shape: TensorShape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
    if kind.name in _PLAIN:
        return LazyTensor(path, _PLAIN[kind.name], shape, partial(_plain, tensor.data, _PLAIN[kind.name], shape))
    if kind not in _type_traits:
        raise CheckpointError(
            f"{path}: the type {kind.name} of {tensor.name} is not supported by the package gguf",
            hint="upgrade gguf, or use the HuggingFace folder of the model",
        )
    dtype = torch.bfloat16 if kind.name == "MXFP4" else torch.float32
    return LazyTensor(path, dtype, shape, partial(_dequantize, tensor, dtype, shape), costly=True)


def _plain(data: np.ndarray[Any, Any], dtype: torch.dtype, shape: TensorShape) -> Tensor:
    return torch.from_numpy(data.view(np.uint8)).view(dtype).view(shape)


def _dequantize(tensor: ReaderTensor, dtype: torch.dtype, shape: TensorShape) -> Tensor:
    """Dequantize a few rows at a time, to limit memory beyond the result."""
    from gguf import dequantize

    out = torch.empty(shape, dtype=dtype)
    data, rows = tensor.data.reshape(-1, tensor.data.shape[-1]), out.view(-1, shape[-1])
    step = max(1, _CHUNK // shape[-1])
    for begin in range(0, len(rows), step):
        rows[begin : begin + step] = torch.from_numpy(dequantize(data[begin : begin + step], tensor.tensor_type))
    return out
