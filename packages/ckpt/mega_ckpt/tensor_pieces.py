"""Mapping of the elements of local tensors to global tensors of the model.

A *piece* maps a rectangle of a local tensor to a rectangle of a named global tensor. A plain weight has one piece, a
fused gate-up projection two, a fused query-key-value projection three. Names and global shapes are canonical:
HuggingFace-shaped, unfused, vocabulary unpadded, so that checkpoints are independent of the parallel layout.

Checkpoints, resharding, conversion, ZeRO shards, initialization and the gradient norm are all written in terms of pieces.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TensorShape = tuple[int, ...]

# A checksum covers a slab, so verified reads read whole slabs: small slabs favor reads, large ones a small manifest.
MAX_SLAB_BYTES = 32 << 20


def crop_tensor(tensor: Tensor, offset: Iterable[int], shape: Iterable[int]) -> Tensor:
    """Return `tensor[offset : offset + shape]` as a view."""
    return tensor[tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))]


@dataclass(frozen=True)
class TensorPiece:
    """A rectangle of a rank's local tensor and its position in the global (unsharded) tensor `name`.

    Attributes:
        name: canonical name of the global tensor.
        global_shape: its shape.
        global_offset: index, in the global tensor, of the rectangle's first element.
        local_start: index, in the local tensor, of the rectangle's first element.
        shape: the rectangle's shape. Local and global tensor have the same number of axes.
    """

    name: str
    global_shape: TensorShape
    global_offset: TensorShape
    local_start: TensorShape
    shape: TensorShape

    def __post_init__(self) -> None:
        axes = {len(self.global_shape), len(self.global_offset), len(self.local_start), len(self.shape)}
        inside = all(
            o >= 0 and o + n <= g for o, n, g in zip(self.global_offset, self.shape, self.global_shape, strict=True)
        )
        assert len(axes) == 1, f"{self}: offsets and shapes differ in their number of axes"
        assert inside, f"{self}: reaches outside the global tensor"

    @classmethod
    def whole_tensor(cls, name: str, shape: Sequence[int]) -> TensorPiece:
        """Return the `TensorPiece` of a tensor that is not sharded: the local tensor is the whole global one."""
        zeros = (0,) * len(shape)
        return cls(name, tuple(shape), zeros, zeros, tuple(shape))

    def local_view(self, local: Tensor) -> Tensor:
        """Return a view of the part of the local tensor `local` that this tensor slice covers."""
        return crop_tensor(local, self.local_start, self.shape)


@dataclass(frozen=True)
class TensorBox:
    """A local tensor with the elements `global[offset : offset + tensor.shape]` of some global tensor; usually a view."""

    offset: TensorShape
    tensor: Tensor


@dataclass
class ShardedTensor:
    """The share of one global tensor on one rank: its global shape and any number of disjoint rectangular slices."""

    shape: TensorShape
    boxes: list[TensorBox]


def boxes_by_name(tensors: Iterable[tuple[Tensor, Sequence[TensorPiece]]]) -> dict[str, ShardedTensor]:
    """Return {global name: ShardedTensor} for local tensors and their positions in global ones; results are views."""
    out: dict[str, ShardedTensor] = {}
    for tensor, pieces in tensors:
        for piece in pieces:
            held = out.setdefault(piece.name, ShardedTensor(piece.global_shape, []))
            held.boxes.append(TensorBox(piece.global_offset, piece.local_view(tensor)))
    return out


def map_flat_range_to_sharded_tensors(
    flat: Tensor, pieces: Sequence[TensorPiece], local_shape: TensorShape, start: int
) -> dict[str, ShardedTensor]:
    """Return {global name: ShardedTensor} for a range of a flattened local tensor, as ZeRO shards it.
    `pieces` are rectangles of the unflattened tensor. All results are views of `flat`.

    `flat` holds elements [start, start + len(flat)) of the local tensor in row-major order. The range is cut into at
    most 2 * axes - 1 rectangles, and each is intersected with each piece.
    """
    out: dict[str, ShardedTensor] = {}
    for low, extent, first in split_flat_range(local_shape, start, start + flat.numel()):
        block = flat[first - start : first - start + math.prod(extent)].view(extent)
        for piece in pieces:
            overlap = compute_slice_overlap(low, extent, piece.local_start, piece.shape)
            if overlap is None:
                continue
            begin, size = overlap
            inner = crop_tensor(block, tuple(b - a for b, a in zip(begin, low, strict=True)), size)
            offset = tuple(g + b - s for g, b, s in zip(piece.global_offset, begin, piece.local_start, strict=True))
            out.setdefault(piece.name, ShardedTensor(piece.global_shape, [])).boxes.append(TensorBox(offset, inner))
    return out


def split_flat_range(shape: TensorShape, start: int, stop: int) -> Iterator[tuple[TensorShape, TensorShape, int]]:
    """Split a range of elements of a tensor, in row-major order, into rectangles.
    The elements are [start, stop) of a tensor of `shape`. A rectangle is (first index, extent, first flat position).
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,) if shape else ()), ((stop - start,) if shape else ()), start
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows are [first, last)
    if first > last:  # the range is inside one row
        yield from _row_part(shape, start // row, start, stop)
        return
    if start < first * row:
        yield from _row_part(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), first * row
    if last * row < stop:
        yield from _row_part(shape, last, last * row, stop)


def _row_part(shape: TensorShape, row: int, start: int, stop: int) -> Iterator[tuple[TensorShape, TensorShape, int]]:
    base = row * math.prod(shape[1:])
    for low, extent, first in split_flat_range(shape[1:], start - base, stop - base):
        yield (row, *low), (1, *extent), first + base


def split_slice_by_elements(shape: TensorShape, max_elements: int) -> Iterator[tuple[TensorShape, TensorShape]]:
    """Split a rectangle into rectangles of at most `max_elements`, each contiguous in row-major order.
    The rectangle has `shape`. Its parts (offset, shape) are yielded in row-major order.

    The number of parts is a power of two and their sizes are equal where possible, so that they align with shards of most
    parallel layouts.
    """
    axis = next((axis for axis, n in enumerate(shape) if n > 1), None)
    if axis is None or math.prod(shape) <= max_elements:
        yield (0,) * len(shape), shape
        return
    fitting = max(1, max_elements // math.prod(shape[axis + 1 :]))
    parts = 1 << (-(-shape[axis] // fitting) - 1).bit_length()
    rows = -(-shape[axis] // parts)
    for start in range(0, shape[axis], rows):
        inner = (*shape[:axis], min(rows, shape[axis] - start), *shape[axis + 1 :])
        for offset, extent in split_slice_by_elements(inner, max_elements):
            yield (*offset[:axis], offset[axis] + start, *offset[axis + 1 :]), extent


def split_slice_by_bytes(box: TensorBox, max_bytes: int) -> Iterator[TensorBox]:
    """Split a tensor slice into slices of at most `max_bytes`, each contiguous in row-major order, as views."""
    for start, shape in split_slice_by_elements(tuple(box.tensor.shape), max_bytes // box.tensor.element_size()):
        yield TensorBox(
            tuple(o + s for o, s in zip(box.offset, start, strict=True)), crop_tensor(box.tensor, start, shape)
        )


def select_replica_share(
    tensors: Mapping[str, ShardedTensor], rank: int, size: int, max_bytes: int = MAX_SLAB_BYTES
) -> dict[str, ShardedTensor]:
    """Return the share of tensors replicated on `size` ranks that rank `rank` saves.
    Each element is saved by one rank, and all ranks save about the same number of bytes.
    """
    if size == 1:
        return dict(tensors)
    out: dict[str, ShardedTensor] = {}
    loads = [(0, saver) for saver in range(size)]  # a heap
    for name, held in tensors.items():
        for slab in (slab for box in held.boxes for slab in split_slice_by_bytes(box, max_bytes)):
            load, saver = loads[0]
            heapq.heapreplace(loads, (load + slab.tensor.nbytes, saver))
            if saver == rank:
                out.setdefault(name, ShardedTensor(held.shape, [])).boxes.append(slab)
    return out


def merge_sharded_tensors(parts: Iterable[Mapping[str, ShardedTensor]]) -> dict[str, ShardedTensor]:
    """Merge several {name: ShardedTensor} into one, appending the slices of each tensor."""
    out: dict[str, ShardedTensor] = {}
    for part in parts:
        for name, held in part.items():
            out.setdefault(name, ShardedTensor(held.shape, [])).boxes.extend(held.boxes)
    return out


def compute_slice_overlap(
    offset: TensorShape, shape: TensorShape, other_offset: TensorShape, other_shape: TensorShape
) -> tuple[TensorShape, TensorShape] | None:
    """Return the overlap of two rectangular slices of one tensor as (offset, shape); None if it has no elements."""
    begin = tuple(map(max, offset, other_offset))
    end = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True))
    return (begin, tuple(e - b for b, e in zip(begin, end, strict=True))) if all(map(int.__lt__, begin, end)) else None


def copy_overlap(destination: TensorBox, source: TensorBox) -> int:
    """Copy the overlap of two slices of one global tensor from `source` to `destination`; return the number of elements."""
    overlap = compute_slice_overlap(destination.offset, destination.tensor.shape, source.offset, source.tensor.shape)
    if overlap is None:
        return 0
    begin, shape = overlap
    target, origin = (
        crop_tensor(box.tensor, tuple(b - o for b, o in zip(begin, box.offset, strict=True)), shape)
        for box in (destination, source)
    )
    with torch.no_grad():
        target.copy_(origin)
    return math.prod(shape)
