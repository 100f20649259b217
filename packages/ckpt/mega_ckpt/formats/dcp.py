"""Folders of torch.distributed.checkpoint, opened without loading them: what FSDP, torchtitan, Accelerate and Megatron save.

    .metadata            pickle: {name: shape, dtype, chunks}, {(name, offset): file, first byte, bytes}
    __0_0.distcp ...     one `torch.save` archive after another

All pickles go through `pickles`, and tensors stay in their files until they are read.
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

from mega_ckpt.formats.pickles import MAX_PICKLE_BYTES, load_pickle
from mega_ckpt.formats.torch_archive import StoredTensor, load_archive
from mega_ckpt.manifest import MAX_AXES
from mega_ckpt.pieces import Box, Shape, copy_overlap
from mega_common.errors import CheckpointError

METADATA = ".metadata"


@dataclass(frozen=True)
class Stored:
    """A rectangle of a tensor, in some file: where it is in the tensor, and how it is read."""

    offset: Shape
    shape: Shape
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Saved:
    """A tensor of a folder: its dtype and global shape, and the rectangles that it is stored as."""

    dtype: torch.dtype
    shape: Shape
    chunks: Sequence[Stored]

    def read(self) -> Tensor:
        """The whole tensor: mapped, where it is one rectangle."""
        held = sum(math.prod(chunk.shape) for chunk in self.chunks)
        if held < math.prod(self.shape):
            raise CheckpointError(f"the shards of a tensor of shape {list(self.shape)} have {held} of its elements")
        if len(self.chunks) == 1 and self.chunks[0].shape == self.shape:
            return self.chunks[0].read()
        out, copied = torch.empty(self.shape, dtype=self.dtype), 0
        for chunk in self.chunks:
            copied += copy_overlap(Box((0,) * out.dim(), out), Box(chunk.offset, chunk.read()))
        if copied != out.numel():
            raise CheckpointError(f"the shards of a tensor of shape {list(self.shape)} have {copied} of its elements")
        return out


@dataclass(frozen=True)
class Entry:
    """Bytes [begin, end) of a file, which are an archive that holds one tensor, or an object."""

    path: Path
    begin: int
    end: int

    @cached_property
    def value(self) -> Any:
        """What is in it; tensors are not read."""
        return load_archive(self.path, self.begin, self.end)


Entries = Mapping[tuple[str, Shape | None], Entry]  # by name and, of tensors, offset


@dataclass(frozen=True)
class SavedFolder:
    """What a folder holds.

    Attributes:
        keys: all names, of objects too.
        tensors: by name.
        entries: where tensors' rectangles and objects lie.
    """

    keys: Sequence[str]
    tensors: Mapping[str, Saved]
    entries: Entries


def read(folder: Path) -> SavedFolder:
    """Look at a folder without reading its tensors.

    Raises:
        CheckpointError: when it is damaged, or asks for what no checkpoint needs.
    """
    path = folder / METADATA
    if path.stat().st_size > MAX_PICKLE_BYTES:
        raise CheckpointError(f"{path}: larger than {MAX_PICKLE_BYTES} bytes, which no metadata is")
    metadata = load_pickle(path.read_bytes(), str(path))
    with damage(folder):
        sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
        entries = {_place(index): _entry(folder, info, sizes) for index, info in metadata.storage_data.items()}
        held = metadata.state_dict_metadata
        tensors = {key: _saved(key, one, entries) for key, one in held.items() if _is_tensor(one)}
        return SavedFolder(list(held), tensors, entries)


@contextmanager
def failing(message: str) -> Iterator[None]:
    """Around what looks at things that somebody else laid out: where that fails they are not as they should be.

    Raises:
        CheckpointError: with the message and what failed.
    """
    try:
        yield
    except (AttributeError, TypeError, ValueError, KeyError, IndexError, ArithmeticError) as error:
        raise CheckpointError(f"{message} ({error!r})") from None


def damage(folder: Path) -> AbstractContextManager[None]:
    """Around what looks at metadata."""
    return failing(f"{folder / METADATA}: not the metadata of a checkpoint of torch.distributed")


@dataclass(frozen=True)
class _Chunk:
    entry: Entry
    dtype: torch.dtype
    shape: Shape

    def read(self) -> Tensor:
        """The chunk, mapped.

        Raises:
            CheckpointError: when the file holds another tensor than the metadata says.
        """
        value = self.entry.value
        if not isinstance(value, StoredTensor) or (value.dtype, value.shape) != (self.dtype, self.shape):
            raise CheckpointError(
                f"{self.entry.path}: at byte {self.entry.begin} is not the tensor that {METADATA} says"
            )
        return value.read()


def _saved(key: str, one: Any, entries: Entries) -> Saved:
    dtype, chunks = _dtype(one), []
    for chunk in one.chunks:
        offset, shape = _sizes(chunk.offsets), _sizes(chunk.sizes)
        entry = entries[key, offset]
        if math.prod(shape) * dtype.itemsize > entry.end - entry.begin:
            raise CheckpointError(
                f"{entry.path}: at byte {entry.begin} is not the tensor that {METADATA} says: {key} {list(shape)} does not "
                f"fit {entry.end - entry.begin:,} bytes"
            )
        chunks.append(Stored(offset, shape, _Chunk(entry, dtype, shape).read))
    return Saved(dtype, _sizes(one.size), chunks)


def _place(index: Any) -> tuple[str, Shape | None]:
    offset = index.state.get("offset")  # absent for objects
    return str(index.fqn), None if offset is None else _sizes(offset)


def _entry(folder: Path, info: Any, sizes: Mapping[str, int]) -> Entry:
    name, begin, length = info.relative_path, info.offset, info.length
    if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+\.distcp", name):
        raise CheckpointError(f"{folder / METADATA}: {name!r} is not the plain name of a file in the same folder")
    if info.state.get("transform_descriptors"):
        raise CheckpointError(f"{folder / METADATA}: {name} is compressed", hint="save it again without compression")
    (begin, length) = _sizes((begin, length))
    if begin + length > (size := sizes.get(name, 0)):  # of a file that is not there too
        state = f"{size:,} bytes long, but {begin + length:,} are expected" if name in sizes else "no such file"
        raise CheckpointError(f"{folder / name}: cannot be read ({state})", hint="copy the file again")
    return Entry(folder / name, begin, begin + length)


def _is_tensor(one: Any) -> bool:
    return str(one.name).endswith(".TensorStorageMetadata")


def _sizes(numbers: Any) -> Shape:
    out = tuple(numbers)
    if len(out) > MAX_AXES or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in out):
        raise ValueError(f"{out!r:.80} are not sizes")
    return out


def _dtype(one: Any) -> torch.dtype:
    kind = one.properties.state
    found = getattr(torch, (kind[0] if isinstance(kind, tuple) else kind["dtype"]).name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
