"""Safetensors files, tensor by tensor: eight bytes of length, a JSON header, the tensors' bytes.

The library reads and writes whole files; conversion needs the exact bytes of the header, tensors that are mapped and read
on use, and files that are written as tensors arrive. Format: huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from mega_ckpt.manifest import DTYPE_NAMES, DTYPES
from mega_ckpt.resumable_folder import FinishedFile
from mega_ckpt.shard_files import HashingFileWriter, tensor_bytes
from mega_ckpt.storage import open_storage_folder
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.bounded_parsing import parse_json_text, refuse_lfs_pointer
from mega_common.errors import CheckpointError
from mega_common.object_store import Location

_LONGEST_HEADER = 100_000_000  # bytes; the library's own limit


@dataclass(frozen=True)
class SafetensorsEntry:
    """One tensor of a safetensors file: dtype, shape, and its bytes [start, stop) counted from the end of the header."""

    dtype: torch.dtype
    shape: TensorShape
    start: int
    stop: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """Header of a safetensors file.

    Attributes:
        text: bytes of the header in the file, including padding.
        entries: {name: entry} in the order of the tensors' bytes.
        metadata: free-form strings; `{"format": "pt"}` in files for torch.
    """

    text: bytes
    entries: Mapping[str, SafetensorsEntry]
    metadata: Mapping[str, str]

    @classmethod
    def parse_header(cls, text: bytes, path: Location) -> Self:
        """Parse and check the JSON text of a safetensors header; `path` is for error messages.

        Raises:
            CheckpointError: when it is not JSON of this format, or the tensors overlap, leave gaps or have a size that
                conflicts with their shape.
        """
        try:
            fields = parse_json_text(text)
            metadata = fields.pop("__metadata__", {})
            found = {name: _parse_entry(value) for name, value in fields.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a safetensors file, or its header is damaged ({error})") from None
        entries = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)))
        position = 0
        for name, entry in entries.items():
            size = math.prod(entry.shape) * entry.dtype.itemsize
            if entry.start != position or entry.stop - entry.start != size:
                raise CheckpointError(
                    f"{path}: the byte range of {name} conflicts with its shape {list(entry.shape)}",
                    hint="download or copy the file again",
                )
            position = entry.stop
        return cls(text, entries, metadata)

    @classmethod
    def make_header(cls, tensors: Mapping[str, tuple[torch.dtype, TensorShape]], metadata: Mapping[str, str]) -> Self:
        """Return the header of a safetensors file with `tensors`.
        The tensors are in the order of the safetensors library: wide dtypes first, then by name.
        """
        entries: dict[str, SafetensorsEntry] = {}
        position = 0
        for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
            dtype, shape = tensors[name]
            size = math.prod(shape) * dtype.itemsize
            entries[name] = SafetensorsEntry(dtype, shape, position, position + size)
            position += size
        fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        for name, entry in entries.items():
            fields[name] = {
                "dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [entry.start, entry.stop],
            }  # fmt: skip
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        return cls(text + b" " * (-len(text) % 8), entries, metadata)

    @property
    def encoded_header(self) -> bytes:
        """First bytes of the safetensors file: length (8 bytes) and text of the header."""
        return struct.pack("<Q", len(self.text)) + self.text

    @property
    def total_bytes(self) -> int:
        """Total size in bytes of the file's tensors, without the header."""
        return max((entry.stop for entry in self.entries.values()), default=0)


def _parse_entry(fields: Mapping[str, Any]) -> SafetensorsEntry:
    shape, (start, stop) = tuple(fields["shape"]), fields["data_offsets"]
    if fields["dtype"] not in DTYPES:
        raise ValueError(f"dtype {fields['dtype']!r} is not supported")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)):
        raise ValueError("sizes must be numbers")
    return SafetensorsEntry(DTYPES[fields["dtype"]], shape, start, stop)


@dataclass(frozen=True)
class SafetensorsFile:
    """An existing safetensors file with a valid header and the length that the header implies."""

    path: Location
    header: SafetensorsHeader

    @classmethod
    def open_file(cls, path: Location) -> Self:
        """Open a safetensors file: read and check the header and the file's length.

        Raises:
            CheckpointError: when the file is missing, truncated, too long or not of this format.
        """
        try:
            file = open_storage_folder(path.parent).open_file(path.name)
            size = file.file_size()
            length = struct.unpack("<Q", tensor_bytes(file.read_range(0, 8)))[0] if size >= 8 else _LONGEST_HEADER
            if length > min(_LONGEST_HEADER, size - 8):
                refuse_lfs_pointer(path, CheckpointError, bytes(tensor_bytes(file.read_range(0, min(size, 64)))))
                raise CheckpointError(f"{path}: truncated, or not a safetensors file ({size} bytes)")
            header = SafetensorsHeader.parse_header(bytes(tensor_bytes(file.read_range(8, 8 + length))), path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or 'no such file'})") from None
        expected = 8 + length + header.total_bytes
        if size != expected:
            state = "truncated" if size < expected else "too long"
            raise CheckpointError(
                f"{path}: {state}: {size} bytes instead of {expected}", hint="download or copy the file again"
            )
        return cls(path, header)

    def read_tensor(self, name: str) -> Tensor:
        """Read a tensor of a safetensors file.
        From a local file it is a private memory map, whose bytes are read when used and released with the tensor.
        """
        entry = self.header.entries[name]
        begin = 8 + len(self.header.text)
        data = (
            open_storage_folder(self.path.parent)
            .open_file(self.path.name)
            .read_range(begin + entry.start, begin + entry.stop)
        )
        # Old writers did not pad the header, so elements may be unaligned.
        aligned = data if (begin + entry.start) % entry.dtype.itemsize == 0 else data.clone()
        return aligned.view(entry.dtype).view(entry.shape)


def write_safetensors(
    path: Location,
    header: SafetensorsHeader,
    tensors: Iterable[Tensor],
    advance: Callable[[int], object] = lambda _: None,
) -> FinishedFile:
    """Write a safetensors file from an iterable of tensors in the order of `header.entries`; durable when this returns.

    A thread reads the next tensor while one is written. `advance` is called with the bytes of each.
    """
    with HashingFileWriter(path) as file:
        file.write_hashed(header.encoded_header)
        for tensor in _prefetch(tensors):
            file.write_hashed(tensor_bytes(tensor))
            advance(tensor.nbytes)
        return FinishedFile(file=file.close())


def _prefetch(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors, each made by a thread while the previous one is used."""
    made = iter(tensors)
    with ThreadPoolExecutor(max_workers=1) as thread:
        following = thread.submit(next, made, None)
        while (tensor := following.result()) is not None:
            following = thread.submit(next, made, None)
            yield tensor
