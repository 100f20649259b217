"""Safetensors files, tensor by tensor: eight bytes of length, a JSON header, the tensors' bytes.

The library reads and writes whole files; conversion needs less: the header byte for byte, a tensor that is only mapped
until it is used, and a file that is written while its tensors come in. Format: huggingface.co/docs/safetensors.
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

from mega_ckpt.journal import Finished
from mega_ckpt.manifest import DTYPE_NAMES, DTYPES
from mega_ckpt.pieces import Shape
from mega_ckpt.shards import NewFile, raw
from mega_ckpt.storage import folder_at
from mega_common.errors import CheckpointError
from mega_common.remote import Place

_LONGEST_HEADER = 100_000_000  # bytes; the library's own limit


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: what it is, and its bytes [start, stop) counted from the end of the header."""

    dtype: torch.dtype
    shape: Shape
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A file's header.

    Attributes:
        text: its bytes as they are in the file, padding included.
        entries: {name: Entry} in the order of the tensors' bytes.
        metadata: free text that travels along; `{"format": "pt"}` in files for torch.
    """

    text: bytes
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]

    @classmethod
    def parse(cls, text: bytes, path: Place) -> Self:
        """Check a header.

        Raises:
            CheckpointError: when it is no JSON of this format, or the tensors overlap, leave holes or have a size that
                is not that of their shape.
        """
        try:
            fields = json.loads(text)
            metadata = fields.pop("__metadata__", {})
            found = {name: _entry(value) for name, value in fields.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a safetensors file (its header is broken: {error})") from None
        entries = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)))
        position = 0
        for name, entry in entries.items():
            size = math.prod(entry.shape) * entry.dtype.itemsize
            if entry.start != position or entry.stop - entry.start != size:
                raise CheckpointError(f"{path}: {name}: its bytes are not where its shape {list(entry.shape)} says")
            position = entry.stop
        return cls(text, entries, metadata)

    @classmethod
    def make(cls, tensors: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str]) -> Self:
        """The header of a file that holds `tensors`, in the library's order: wide types first, then by name."""
        entries: dict[str, Entry] = {}
        position = 0
        for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
            dtype, shape = tensors[name]
            size = math.prod(shape) * dtype.itemsize
            entries[name] = Entry(dtype, shape, position, position + size)
            position += size
        fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        for name, entry in entries.items():
            fields[name] = {
                "dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [entry.start, entry.stop],
            }  # fmt: skip
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        return cls(text + b" " * (-len(text) % 8), entries, metadata)

    @property
    def start(self) -> bytes:
        """What a file begins with: the length and the text."""
        return struct.pack("<Q", len(self.text)) + self.text

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return max((entry.stop for entry in self.entries.values()), default=0)


def _entry(fields: Mapping[str, Any]) -> Entry:
    shape, (start, stop) = tuple(fields["shape"]), fields["data_offsets"]
    if fields["dtype"] not in DTYPES:
        raise ValueError(f"dtype {fields['dtype']!r} is not known")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)):
        raise ValueError("a size is not a number")
    return Entry(DTYPES[fields["dtype"]], shape, start, stop)


@dataclass(frozen=True)
class SafetensorsFile:
    """An existing file, checked: its header is sound and its length is the one that the header says."""

    path: Place
    header: Header

    @classmethod
    def open(cls, path: Place) -> Self:
        """Read and check the header.

        Raises:
            CheckpointError: when the file is missing, truncated, too long or not of this format.
        """
        try:
            file = folder_at(path.parent).open(path.name)
            size = file.size()
            length = struct.unpack("<Q", raw(file.read(0, 8)))[0] if size >= 8 else _LONGEST_HEADER
            if length > min(_LONGEST_HEADER, size - 8):
                raise CheckpointError(f"{path}: truncated, or not a safetensors file ({size} bytes)")
            header = Header.parse(bytes(raw(file.read(8, 8 + length))), path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or 'no such file'})") from None
        expected = 8 + length + header.size
        if size != expected:
            state = "truncated" if size < expected else "too long"
            raise CheckpointError(
                f"{path}: {state}: {size} bytes instead of {expected}", hint="download or copy the file again"
            )
        return cls(path, header)

    def read(self, name: str) -> Tensor:
        """A tensor: of a file here as a private mapping, whose bytes are read when they are used and given back with it."""
        entry = self.header.entries[name]
        begin = 8 + len(self.header.text)
        data = folder_at(self.path.parent).open(self.path.name).read(begin + entry.start, begin + entry.stop)
        # Old writers did not pad the header, so that elements may lie anywhere.
        aligned = data if (begin + entry.start) % entry.dtype.itemsize == 0 else data.clone()
        return aligned.view(entry.dtype).view(entry.shape)


def write_file(
    path: Place, header: Header, tensors: Iterable[Tensor], advance: Callable[[int], object] = lambda _: None
) -> Finished:
    """Write a file while its tensors come in, in the order of `header.entries`; durable when this returns.

    A thread reads a tensor while the one before it is written. `advance` is told of the bytes of each.
    """
    with NewFile(path) as file:
        file.write(header.start)
        for tensor in _ahead(tensors):
            file.write(raw(tensor))
            advance(tensor.nbytes)
        return Finished(file=file.close())


def _ahead(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The same tensors, each made by a thread while the one before it is used."""
    made = iter(tensors)
    with ThreadPoolExecutor(max_workers=1) as thread:
        following = thread.submit(next, made, None)
        while (tensor := following.result()) is not None:
            following = thread.submit(next, made, None)
            yield tensor
