"""Shards: safetensors files written in one pass, hashed while written, durable when closed, and read by mmap.

The format is 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, the data
(https://github.com/huggingface/safetensors). The header follows from the manifest, so readers compare its bytes instead
of parsing it.
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

from mega_ckpt.manifest import DTYPE_NAMES, ManifestFileEntry, TensorChunk
from mega_ckpt.resumable_folder import FinishedFile, RunOnce, write_without_journal
from mega_ckpt.storage import open_storage_folder
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import CheckpointError
from mega_common.object_store import Location

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class UnwrittenTensorChunk:
    """Rectangular slice of a global tensor, to be written to a shard file as one chunk.
    It is [offset, offset + shape) of the tensor `key`.
    """

    key: str
    dtype: torch.dtype
    global_shape: TensorShape
    offset: TensorShape
    shape: TensorShape

    @property
    def nbytes(self) -> int:
        """Size in bytes of this slice of a tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def sort_key(self) -> tuple[int, str, TensorShape]:
        """Sort key for the order of tensor slices in a file, wide elements first.
        With this order each slice is aligned to its element size and can be memory-mapped.
        """
        return -self.dtype.itemsize, self.key, self.offset

    @property
    def header_name(self) -> str:
        """Name of this tensor slice in the safetensors header.
        It is the tensor's key, followed by the index range unless the slice is the whole tensor.
        """
        if self.shape == self.global_shape:
            return self.key
        return f"{self.key}[{','.join(f'{o}:{o + n}' for o, n in zip(self.offset, self.shape, strict=True))}]"


def safetensors_header(slabs: Iterable[UnwrittenTensorChunk]) -> bytes:
    """Return the safetensors header of a file with these tensor slices in this order, padded to a multiple of 8 bytes."""
    entries, position = {}, 0
    for slab in slabs:
        entries[slab.header_name] = {
            "dtype": DTYPE_NAMES[slab.dtype],
            "shape": list(slab.shape),
            "data_offsets": [position, position := position + slab.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class HashingFileWriter:
    """A new file that is hashed (XXH3-128) while it is written.
    It is complete and durable when `close` returns. An existing file is never overwritten.
    """

    def __init__(self, path: Location) -> None:
        self.path, self.bytes = path, 0
        self._hash = xxhash.xxh3_128()
        self._file = open_storage_folder(path.parent).create_file(path.name)

    def write_hashed(self, data: bytes | memoryview, *digests: xxhash.xxh3_128) -> None:
        """Append `data` to the file, and update the caller's hashes `digests` with it."""
        view = memoryview(data)
        # Hashing and writing block by block uses the processor's cache: twice as fast as hashing all data first.
        for start in range(0, len(view), BLOCK_BYTES):
            block = view[start : start + BLOCK_BYTES]
            for digest in (self._hash, *digests):
                digest.update(block)
            self._file.write_block(block)
            self.bytes += len(block)

    def close(self) -> ManifestFileEntry:
        """Finish the file and make it durable; return its length and checksum."""
        self._file.finish_file()
        return ManifestFileEntry(bytes=self.bytes, checksum=self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.release_file()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, as a view if it is contiguous host memory."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def write_shards(
    folder: Location,
    prefix: str,
    slabs: Sequence[UnwrittenTensorChunk],
    resolve: Callable[[UnwrittenTensorChunk], Tensor],
    max_bytes: int,
    once: RunOnce = write_without_journal,
) -> Iterator[tuple[list[tuple[UnwrittenTensorChunk, TensorChunk]], ManifestFileEntry]]:
    """Write tensor slices to files of at most about `max_bytes` while iterated; yield each file's slices, chunks and entry.
    The files are `<prefix>-000.safetensors`, ...; `resolve` returns the content of a slice; an entry is the
    length and checksum of a file.

    `resolve` is called for one slab at a time, so tensors on a device need host memory for one slab only. `once` skips
    files that are already complete.
    """
    for number, group in enumerate(group_chunks_by_file(sorted(slabs, key=lambda slab: slab.sort_key), max_bytes)):
        name, head = f"{prefix}-{number:03d}.safetensors", safetensors_header(group)
        done = once(name, head, partial(_write_shard, folder / name, head, group, resolve))
        ends = list(itertools.accumulate((slab.nbytes for slab in group), initial=len(head)))
        contents = [
            (
                slab,
                TensorChunk(offset=slab.offset, shape=slab.shape, file=name, begin=begin, end=end, checksum=checksum),
            )
            for slab, (begin, end), checksum in zip(group, itertools.pairwise(ends), done.parts, strict=True)
        ]
        yield contents, done.file


def _write_shard(
    path: Location,
    head: bytes,
    slabs: Sequence[UnwrittenTensorChunk],
    resolve: Callable[[UnwrittenTensorChunk], Tensor],
) -> FinishedFile:
    with HashingFileWriter(path) as file:
        file.write_hashed(head)
        checksums = []
        for slab in slabs:
            part = xxhash.xxh3_128()
            file.write_hashed(tensor_bytes(resolve(slab)), part)
            checksums.append(part.hexdigest())
        return FinishedFile(file=file.close(), parts=tuple(checksums))


def group_chunks_by_file(slabs: Sequence[UnwrittenTensorChunk], max_bytes: int) -> Iterator[list[UnwrittenTensorChunk]]:
    """Yield groups of consecutive tensor slices, one per new file: as many as fit in `max_bytes`, at least one."""
    group: list[UnwrittenTensorChunk] = []
    size = 0
    for slab in slabs:
        if group and size + slab.nbytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(slab)
        size += slab.nbytes
    if group:
        yield group


class ShardFile:
    """An existing shard file, opened for reading: only the accessed bytes are read, and kept only while in use."""

    def __init__(self, path: Location, slabs: Sequence[UnwrittenTensorChunk], first_byte: int) -> None:
        self.path = path
        self._file = open_storage_folder(path.parent).open_file(path.name)
        expected = safetensors_header(slabs)
        if len(expected) != first_byte or tensor_bytes(self._file.read_range(0, first_byte)) != expected:
            keys = _describe_keys([slab.key for slab in slabs])
            raise CheckpointError(
                f"{path}: damaged: its header conflicts with the manifest ({keys})", hint="use another checkpoint"
            )

    def read_chunk(self, key: str, dtype: torch.dtype, chunk: TensorChunk, *, verify: bool) -> Tensor:
        """Return a chunk of the tensor `key` as a view of the shard file's bytes.

        Raises:
            CheckpointError: when `verify` is set and the checksum does not match.
        """
        data = self._file.read_range(chunk.begin, chunk.end, whole=verify)
        if verify and xxhash.xxh3_128_hexdigest(tensor_bytes(data)) != chunk.checksum:
            raise CheckpointError(
                f"{self.path}: damaged: the checksum of {key} at {list(chunk.offset)} does not match",
                hint="use another checkpoint",
            )
        return data.view(dtype).view(chunk.shape)


def check_file_size(path: Location, size: Callable[[], int], entry: ManifestFileEntry, keys: Sequence[str]) -> None:
    """Raise CheckpointError if a checkpoint's file is missing or has another length than the manifest's `entry`.

    The file at `path` contains the tensors `keys`; `size` returns its actual length.
    """
    try:
        found = size()
    except (FileNotFoundError, NotADirectoryError):
        message = f"{path}: the file is missing ({_describe_keys(keys)})"
        raise CheckpointError(message, hint="copy the whole checkpoint again, or use another one") from None
    if found != entry.bytes:
        raise CheckpointError(
            f"{path}: has {found} bytes instead of {entry.bytes} ({_describe_keys(keys)})",
            hint="copy the whole checkpoint again, or move it elsewhere to resume from an older one",
        )


def _describe_keys(keys: Sequence[str]) -> str:
    if not keys:
        return "no tensors"
    return f"tensor {keys[0]}" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
