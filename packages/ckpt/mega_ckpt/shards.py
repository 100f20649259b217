"""Shards: safetensors files that are written in one pass, hashed on the way and durable when closed, and read by mapping.

The format is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, the data
(https://github.com/huggingface/safetensors). What a header must be follows from the manifest, so a reader of ours never
parses one: it compares bytes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
import xxhash
from torch import Tensor

from mega_ckpt.journal import Finished, Once, always
from mega_ckpt.manifest import DTYPE_NAMES, Chunk, FileEntry
from mega_ckpt.pieces import Shape
from mega_ckpt.storage import folder_at
from mega_common.errors import CheckpointError
from mega_common.remote import Place

BLOCK_BYTES = 1 << 20


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
    """A file in the making: never an existing one, hashed while it is written, whole and durable when `close` returns."""

    def __init__(self, path: Place) -> None:
        self.path, self.bytes = path, 0
        self._hash = xxhash.xxh3_128()
        self._file = folder_at(path.parent).create(path.name)

    def write(self, data: bytes | memoryview, *own: xxhash.xxh3_128) -> None:
        """Append `data`, and add it to hashes of the caller's own."""
        whole = memoryview(data)
        # A block that was just hashed is written from the processor's cache: twice as fast as one after the other.
        for start in range(0, len(whole), BLOCK_BYTES):
            block = whole[start : start + BLOCK_BYTES]
            for digest in (self._hash, *own):
                digest.update(block)
            self._file.write(block)
            self.bytes += len(block)

    def close(self) -> FileEntry:
        """Finish the file; returns what a manifest says of it."""
        self._file.finish()
        return FileEntry(bytes=self.bytes, checksum=self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.release()


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, as a view where it already is contiguous host memory."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def write_shards(
    folder: Place,
    prefix: str,
    slabs: Sequence[Slab],
    resolve: Callable[[Slab], Tensor],
    max_bytes: int,
    once: Once = always,
) -> Iterator[tuple[list[tuple[Slab, Chunk]], FileEntry]]:
    """Write `slabs` to files `<prefix>-000.safetensors`, ... of about `max_bytes` at most; yields what each file holds.

    `resolve` is asked for one slab at a time, so one slab of memory suffices where tensors live on a device. `once`
    passes over files that are there already.
    """
    for number, group in enumerate(groups(sorted(slabs, key=lambda slab: slab.order), max_bytes)):
        name, head = f"{prefix}-{number:03d}.safetensors", header(group)
        done = once(name, head, partial(_write_shard, folder / name, head, group, resolve))
        ends = list(itertools.accumulate((slab.nbytes for slab in group), initial=len(head)))
        held = [
            (slab, Chunk(offset=slab.offset, shape=slab.shape, file=name, begin=begin, end=end, checksum=checksum))
            for slab, (begin, end), checksum in zip(group, itertools.pairwise(ends), done.parts, strict=True)
        ]
        yield held, done.file


def _write_shard(path: Place, head: bytes, slabs: Sequence[Slab], resolve: Callable[[Slab], Tensor]) -> Finished:
    with NewFile(path) as file:
        file.write(head)
        checksums = []
        for slab in slabs:
            part = xxhash.xxh3_128()
            file.write(raw(resolve(slab)), part)
            checksums.append(part.hexdigest())
        return Finished(file=file.close(), parts=tuple(checksums))


def groups(slabs: Sequence[Slab], max_bytes: int) -> Iterator[list[Slab]]:
    """The slabs of one file after another: as many as fit, and at least one."""
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


class Shard:
    """A shard that was written before: only the bytes that are used are read, and no more than they are kept."""

    def __init__(self, path: Place, slabs: Sequence[Slab], first_byte: int) -> None:
        self.path = path
        self._file = folder_at(path.parent).open(path.name)
        expected = header(slabs)
        if len(expected) != first_byte or raw(self._file.read(0, first_byte)) != expected:
            held = _some([slab.key for slab in slabs])
            raise CheckpointError(f"{path}: damaged: its header does not fit the manifest ({held})")

    def view(self, key: str, dtype: torch.dtype, chunk: Chunk, *, verify: bool) -> Tensor:
        """The chunk, as a tensor over what the file holds.

        Raises:
            CheckpointError: when `verify` and the bytes are not those that were written.
        """
        data = self._file.read(chunk.begin, chunk.end, whole=verify)
        if verify and xxhash.xxh3_128_hexdigest(raw(data)) != chunk.checksum:
            raise CheckpointError(
                f"{self.path}: damaged: the checksum of {key} at {list(chunk.offset)} does not fit",
                hint="use another checkpoint",
            )
        return data.view(dtype).view(chunk.shape)


def check_size(path: Place, size: Callable[[], int], entry: FileEntry, keys: Sequence[str]) -> None:
    """Check that a file, which holds `keys`, is there, is a plain one, and has the length that the manifest says.

    `size` tells its length.

    Raises:
        CheckpointError: when not.
    """
    try:
        found = size()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: missing, though the manifest names it ({_some(keys)})") from None
    if found != entry.bytes:
        raise CheckpointError(f"{path}: {found} bytes long, but {entry.bytes} were written ({_some(keys)})")


def _some(keys: Sequence[str]) -> str:
    if not keys:
        return "it holds no tensor"
    return f"it holds {keys[0]}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
