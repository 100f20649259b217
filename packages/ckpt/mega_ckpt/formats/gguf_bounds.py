"""Check of a GGUF header against the size of its file, before a reader allocates memory for the counts that it states.

Layout: magic, version, number of tensors, number of metadata keys; each key with its typed value; each tensor's name,
dimensions, type and offset. Every integer is little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path

MAX_ELEMENTS = 1 << 22  # of all metadata arrays together; a vocabulary of 262,144 tokens has about 1.3 million
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_ELEMENTS_PER_BYTE = 8  # no GGML type stores an element in less than one bit
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of scalar types
_STRING, _ARRAY = 8, 9


def check_header(path: Path) -> None:
    """Check that the counts, lengths and dimensions of a header fit the file.

    Raises:
        ValueError: naming the count that does not fit.
        OSError: when the file cannot be read.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Header(data).check()


class _Header:
    """Cursor over the header of a mapped GGUF file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._size, self._at, self._elements = data, len(data), 0, 0

    def check(self) -> None:
        """Walk the whole header.

        Raises:
            ValueError: at the first count that does not fit the file.
        """
        if self._size < 24 or self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with a GGUF header")
        self._at = 4
        if (version := self._integer("I")) & 0xFFFF == 0:
            raise ValueError("it is big-endian")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, expected 2 or 3")
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
        """Require room in the rest of the file for `count` items of at least `size` bytes."""
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
            raise ValueError(f"the type {kind} of {key} is not known")

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
            raise ValueError(f"{name} has {axes:,} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = [self._integer("Q") for _ in range(axes)]
        if 0 in shape or math.prod(shape) > _ELEMENTS_PER_BYTE * self._size:
            raise ValueError(f"{name} has the dimensions {shape}, which a file of {self._size:,} bytes does not hold")
        self._integer("I")
        if (offset := self._integer("Q")) >= self._size:
            raise ValueError(f"{name} begins at byte {offset:,} of the tensors, beyond the end of the file")
