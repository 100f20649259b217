"""Shards: safetensors files that are written in one pass, hashed on the way and durable when closed, and read by mapping.

The format is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, the data
(https://github.com/huggingface/safetensors). What a header must be follows from the manifest, so a reader of ours never
parses one: it compares bytes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import torch
import xxhash
from torch import Tensor

from mega_ckpt.manifest import DTYPE_NAMES, Chunk, FileEntry, plain_size
from mega_ckpt.pieces import Shape
from mega_common.errors import CheckpointError

BLOCK_BYTES = 1 << 20
AHEAD_BYTES = 2 << 20  # the kernel cuts what is asked for at once to a few megabytes
SENT_BYTES = 64 << 20


@dataclass(frozen=True)
class Slab:
    """A chunk-to-be: the box [offset, offset + shape) of the global tensor `key`."""

    key: str
    dtype: torch.dtype
    global_shape: Shape
    offset: Shape
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def order(self) -> tuple[int, str, Shape]:
        """Place in a file: wide elements first, so that each slab is aligned to its element and can be mapped as it is."""
        return -self.dtype.itemsize, self.key, self.offset

    @property
    def label(self) -> str:
        """The name in the safetensors header: the key, and the slice where it is not the whole tensor."""
        if self.shape == self.global_shape:
            return self.key
        return f"{self.key}[{','.join(f'{o}:{o + n}' for o, n in zip(self.offset, self.shape, strict=True))}]"


def header(slabs: Iterable[Slab]) -> bytes:
    """The safetensors header of a file that holds `slabs` in this order, padded to a multiple of 8 bytes."""
    entries, position = {}, 0
    for slab in slabs:
        entries[slab.label] = {
            "dtype": DTYPE_NAMES[slab.dtype],
            "shape": list(slab.shape),
            "data_offsets": [position, position := position + slab.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class NewFile:
    """A file in the making: never an existing one, hashed while it is written, on the disk when `close` returns."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes = path, 0
        self._sent = 0
        self._hash = xxhash.xxh3_128()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, data: bytes | memoryview) -> str:
        """Append `data`; returns its checksum."""
        own, whole = xxhash.xxh3_128(), memoryview(data)
        # A block that was just hashed is written from the processor's cache: twice as fast as one after the other.
        for start in range(0, len(whole), BLOCK_BYTES):
            block = whole[start : start + BLOCK_BYTES]
            own.update(block)
            self._hash.update(block)
            while block:
                written = os.write(self._descriptor, block)
                block = block[written:]
                self.bytes += written
            if self.bytes - self._sent >= SENT_BYTES:
                self._send()
        return own.hexdigest()

    def _send(self) -> None:
        """Let the disk begin with what is written so far; `close` then waits less, and no write is held up before it."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, self._sent, self.bytes - self._sent, os.POSIX_FADV_DONTNEED)
        self._sent = self.bytes

    def close(self) -> FileEntry:
        """Flush to the disk; returns what a manifest says of the file."""
        os.fsync(self._descriptor)
        return FileEntry(bytes=self.bytes, checksum=self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, as a view where it already is contiguous host memory."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def write_shards(
    folder: Path, prefix: str, slabs: Sequence[Slab], resolve: Callable[[Slab], Tensor], max_bytes: int
) -> Iterator[tuple[list[tuple[Slab, Chunk]], FileEntry]]:
    """Write `slabs` to files `<prefix>-000.safetensors`, ... of about `max_bytes` at most; yields what each file holds.

    `resolve` is asked for one slab at a time, so one slab of memory suffices where tensors live on a device.
    """
    for number, group in enumerate(_groups(sorted(slabs, key=lambda slab: slab.order), max_bytes)):
        name = f"{prefix}-{number:03d}.safetensors"
        held = []
        with NewFile(folder / name) as file:
            file.write(header(group))
            for slab in group:
                begin = file.bytes
                checksum = file.write(raw(resolve(slab)))
                chunk = Chunk(
                    offset=slab.offset,
                    shape=slab.shape,
                    file=name,
                    begin=begin,
                    end=file.bytes,
                    checksum=checksum,
                )
                held.append((slab, chunk))
            entry = file.close()
        yield held, entry


def _groups(slabs: Sequence[Slab], max_bytes: int) -> Iterator[list[Slab]]:
    group: list[Slab] = []
    size = 0
    for slab in slabs:
        if group and size + slab.nbytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(slab)
        size += slab.nbytes
    if group:
        yield group


def mapped(file: IO[bytes], begin: int, end: int, *, whole: bool = False) -> Tensor:
    """Bytes [begin, end) of a file as a private mapping: read when they are used, given back with the tensor. uint8.

    With `whole`, all of them, and no others, are asked of the disk at once; else the kernel guesses what to read ahead.
    """
    if begin == end:
        return torch.empty(0, dtype=torch.uint8)
    before = begin % mmap.ALLOCATIONGRANULARITY
    # Copy-on-write: nothing can write to the file through it, yet torch has the writable memory that it wants.
    memory = mmap.mmap(file.fileno(), end - begin + before, access=mmap.ACCESS_COPY, offset=begin - before)
    if whole:
        for start in range(0, len(memory), AHEAD_BYTES):
            memory.madvise(mmap.MADV_WILLNEED, start, min(AHEAD_BYTES, len(memory) - start))
    return torch.frombuffer(memory, dtype=torch.uint8, offset=before)


class Shard:
    """A shard that was written before: only the bytes that are used are read, and no more than they stay mapped."""

    def __init__(self, path: Path, slabs: Sequence[Slab], first_byte: int) -> None:
        self.path = path
        # Open as long as this is: a checkpoint that is replaced or deleted meanwhile can still be read to its end.
        self._file = open(path, "rb")  # noqa: SIM115
        expected = header(slabs)
        if len(expected) != first_byte or self._file.read(first_byte) != expected:
            held = _some([slab.key for slab in slabs])
            raise CheckpointError(f"{path}: damaged: its header does not fit the manifest ({held})")

    def view(self, key: str, dtype: torch.dtype, chunk: Chunk, *, verify: bool) -> Tensor:
        """The chunk, as a tensor over the mapped file.

        Raises:
            CheckpointError: when `verify` and the bytes are not those that were written.
        """
        data = mapped(self._file, chunk.begin, chunk.end, whole=verify)
        if verify and xxhash.xxh3_128_hexdigest(raw(data)) != chunk.checksum:
            raise CheckpointError(
                f"{self.path}: damaged: the checksum of {key} at {list(chunk.offset)} does not fit",
                hint="use another checkpoint",
            )
        return data.view(dtype).view(chunk.shape)


def check_size(folder: Path, name: str, entry: FileEntry, keys: Sequence[str]) -> None:
    """Check that a file, which holds `keys`, is there, is a plain one, and has the length that the manifest says.

    Raises:
        CheckpointError: when not.
    """
    path = folder / name
    try:
        size = plain_size(folder, name)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: missing, though the manifest names it ({_some(keys)})") from None
    if size != entry.bytes:
        raise CheckpointError(f"{path}: {size} bytes long, but {entry.bytes} were written ({_some(keys)})")


def _some(keys: Sequence[str]) -> str:
    if not keys:
        return "it holds no tensor"
    return f"it holds {keys[0]}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
