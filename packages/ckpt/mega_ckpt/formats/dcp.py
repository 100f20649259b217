"""Folders of torch.distributed.checkpoint, opened without loading them: saved by FSDP, torchtitan, Accelerate and
Megatron.

    .metadata            pickle: {name: shape, dtype, chunks}, {(name, offset): file, first byte, bytes}
    __0_0.distcp ...     one `torch.save` archive after another

Pickles are loaded with `safe_pickles`; tensors are read on use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.formats.safe_pickles import MAX_PICKLE_BYTES, load_untrusted_pickle
from mega_ckpt.formats.torch_archive import StoredTensor, load_torch_archive
from mega_ckpt.manifest import MAX_AXES
from mega_ckpt.tensor_pieces import TensorBox, TensorShape, copy_overlap
from mega_common.errors import CheckpointError

METADATA = ".metadata"


@dataclass(frozen=True)
class StoredTensorSlice:
    """A rectangle of a tensor stored in some file: its offset and shape within the tensor, and a function that reads it."""

    offset: TensorShape
    shape: TensorShape
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class DcpSavedTensor:
    """A tensor in a folder of torch.distributed.checkpoint (DCP).
    It has a dtype and global shape, and the rectangles that it is stored as.
    """

    dtype: torch.dtype
    shape: TensorShape
    chunks: Sequence[StoredTensorSlice]

    def read(self) -> Tensor:
        """Return the whole tensor, memory-mapped if stored as one rectangle; CheckpointError if elements are missing."""
        held = sum(math.prod(chunk.shape) for chunk in self.chunks)
        if held < math.prod(self.shape):
            raise CheckpointError(
                f"the shards of a tensor of shape {list(self.shape)} have only {held} of its elements"
            )
        if len(self.chunks) == 1 and self.chunks[0].shape == self.shape:
            return self.chunks[0].read()
        out, copied = torch.empty(self.shape, dtype=self.dtype), 0
        for chunk in self.chunks:
            copied += copy_overlap(TensorBox((0,) * out.dim(), out), TensorBox(chunk.offset, chunk.read()))
        if copied != out.numel():
            raise CheckpointError(
                f"the shards of a tensor of shape {list(self.shape)} have only {copied} of its elements"
            )
        return out


@dataclass(frozen=True)
class TorchArchiveRange:
    """Byte range [begin, end) of a file that is a `torch.save` archive of one tensor or object."""

    path: Path
    begin: int
    end: int

    @cached_property
    def archived_value(self) -> Any:
        """Content of the archive: an object, or a `StoredTensor` whose data is not read."""
        return load_torch_archive(self.path, self.begin, self.end)


DcpEntries = Mapping[tuple[str, TensorShape | None], TorchArchiveRange]  # by name, and offset of tensors


@dataclass(frozen=True)
class DcpFolder:
    """Contents of a checkpoint folder of torch.distributed.checkpoint (DCP).

    Attributes:
        keys: names of all tensors and objects.
        tensors: tensors by name.
        entries: byte ranges of the rectangles of tensors, and of objects.
    """

    keys: Sequence[str]
    tensors: Mapping[str, DcpSavedTensor]
    entries: DcpEntries


def read_dcp_folder(folder: Path) -> DcpFolder:
    """Open a checkpoint folder of torch.distributed.checkpoint (DCP) without reading its tensors.

    Raises:
        CheckpointError: when it is damaged, or has a function or class that is not allowed.
    """
    path = folder / METADATA
    if path.stat().st_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path}: must have at most {MAX_PICKLE_BYTES} bytes, not {path.stat().st_size}")
    metadata = load_untrusted_pickle(path.read_bytes(), str(path))
    with convert_dcp_metadata_errors(folder):
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
        entries = {
            _storage_key(index): _archive_range(folder, info, sizes) for index, info in metadata.storage_data.items()
        }
        held = metadata.state_dict_metadata
        tensors = {key: _saved_tensor(key, one, entries) for key, one in held.items() if _is_tensor_metadata(one)}
        return DcpFolder(list(held), tensors, entries)


@contextmanager
def convert_parse_errors(message: str) -> Iterator[None]:
    """Context manager that converts exceptions of code that parses untrusted data into a CheckpointError.
    The error has the given `message`.

    Raises:
        CheckpointError: with the message and the exception.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, ArithmeticError) as error:
        raise CheckpointError(f"{message} ({error!r})") from None


def convert_dcp_metadata_errors(folder: Path) -> AbstractContextManager[None]:
    """Context manager that converts exceptions of code that parses DCP's `.metadata` into a CheckpointError.
    The metadata is in `folder`. DCP is torch.distributed.checkpoint.
    """
    return convert_parse_errors(f"{folder / METADATA}: not the metadata of a checkpoint of torch.distributed")


@dataclass(frozen=True)
class _Chunk:
    entry: TorchArchiveRange
    dtype: torch.dtype
    shape: TensorShape

    def read(self) -> Tensor:
        """Return the tensor chunk, memory-mapped from its file.

        Raises:
            CheckpointError: when the tensor in the file conflicts with the metadata.
        """
        value = self.entry.archived_value
        if not isinstance(value, StoredTensor) or (value.dtype, value.shape) != (self.dtype, self.shape):
            raise CheckpointError(f"{self.entry.path}: the tensor at byte {self.entry.begin} conflicts with {METADATA}")
        return value.read()


def _saved_tensor(key: str, one: Any, entries: DcpEntries) -> DcpSavedTensor:
    dtype, chunks = _parse_dtype(one), []
    for chunk in one.chunks:
        offset, shape = _parse_sizes(chunk.offsets), _parse_sizes(chunk.sizes)
        entry = entries[key, offset]
        if math.prod(shape) * dtype.itemsize > entry.end - entry.begin:
            raise CheckpointError(
                f"{entry.path}: the tensor at byte {entry.begin} conflicts with {METADATA}: {key} {list(shape)} does not fit "
                f"in {entry.end - entry.begin:,} bytes"
            )
        chunks.append(StoredTensorSlice(offset, shape, _Chunk(entry, dtype, shape).read))
    return DcpSavedTensor(dtype, _parse_sizes(one.size), chunks)


def _storage_key(index: Any) -> tuple[str, TensorShape | None]:
    offset = index.state.get("offset")  # absent for objects
    return str(index.fqn), None if offset is None else _parse_sizes(offset)


def _archive_range(folder: Path, info: Any, sizes: Mapping[str, int]) -> TorchArchiveRange:
    name, begin, length = info.relative_path, info.offset, info.length
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+\.distcp", name):
        raise CheckpointError(f"{folder / METADATA}: {name!r} must be the plain name of a file in the same folder")
    if info.state.get("transform_descriptors"):
        raise CheckpointError(
            f"{folder / METADATA}: compressed files such as {name} are not supported",
            hint="save the checkpoint again without compression",
        )
    (begin, length) = _parse_sizes((begin, length))
    if begin + length > (size := sizes.get(name, 0)):  # a missing file has size 0
        state = f"{size:,} bytes instead of {begin + length:,}" if name in sizes else "no such file"
        raise CheckpointError(f"{folder / name}: cannot be read ({state})", hint="copy the file again")
    return TorchArchiveRange(folder / name, begin, begin + length)


def _is_tensor_metadata(one: Any) -> bool:
    return str(one.name).endswith(".TensorStorageMetadata")


def _parse_sizes(numbers: Any) -> TensorShape:
    out = tuple(numbers)
    if len(out) > MAX_AXES or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in out):
        raise ValueError(f"{out!r:.80} must be sizes")
    return out


def _parse_dtype(one: Any) -> torch.dtype:
    kind = one.properties.state
    found = getattr(torch, (kind[0] if isinstance(kind, tuple) else kind["dtype"]).name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
