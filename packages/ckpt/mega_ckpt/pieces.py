"""Where a local tensor's elements live in the model: the one description that everything else rests on.

A *piece* says that a rectangle of a local tensor is a rectangle of a named global tensor. A plain weight has one piece, a
fused gate-up projection two, a fused query-key-value projection three. Names and global shapes are canonical:
HuggingFace-shaped, unfused, vocabulary unpadded, so that no layout of ranks ever shows in a checkpoint.

Checkpoints, resharding, conversion, ZeRO slices, initialisation and the gradient norm are all written in terms of pieces.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Shape = tuple[int, ...]

# A checksum covers a slab, so a reader that checks reads whole slabs: small ones suit it, large ones the manifest.
MAX_SLAB_BYTES = 32 << 20


def crop(tensor: Tensor, offset: Iterable[int], shape: Iterable[int]) -> Tensor:
    """`tensor[offset : offset + shape]`, as a view."""
    return tensor[tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))]


@dataclass(frozen=True)
class Piece:
    """A rectangle of a local tensor and the place of that rectangle in the global tensor `name`.

    Attributes:
        name: canonical name of the global tensor.
        global_shape: its shape.
        global_offset: index, in the global tensor, of the rectangle's first element.
        local_start: index, in the local tensor, of the rectangle's first element.
        shape: the rectangle's shape. Local and global tensor have the same number of axes.
    """

    name: str
    global_shape: Shape
    global_offset: Shape
    local_start: Shape
    shape: Shape

    def __post_init__(self) -> None:
        axes = {len(self.global_shape), len(self.global_offset), len(self.local_start), len(self.shape)}
        inside = all(
            o >= 0 and o + n <= g for o, n, g in zip(self.global_offset, self.shape, self.global_shape, strict=True)
        )
        assert len(axes) == 1, f"{self}: offsets and shapes differ in their number of axes"
        assert inside, f"{self}: reaches outside the global tensor"

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Piece:
        """The piece of a tensor that is not split: local and global tensor are the same."""
        zeros = (0,) * len(shape)
        return cls(name, tuple(shape), zeros, zeros, tuple(shape))

    def view(self, local: Tensor) -> Tensor:
        """The rectangle, as a view of the local tensor."""
        return crop(local, self.local_start, self.shape)


@dataclass(frozen=True)
class Box:
    """A tensor that holds `global[offset : offset + tensor.shape]` of some global tensor. Usually a view."""

    offset: Shape
    tensor: Tensor


@dataclass
class Sharded:
    """What one rank holds of one global tensor: its shape and any number of boxes, which do not overlap."""

    shape: Shape
    boxes: list[Box]


def boxes_of(tensors: Iterable[tuple[Tensor, Sequence[Piece]]]) -> dict[str, Sharded]:
    """Sort local tensors with their pieces by global name: {name: Sharded}. The boxes are views."""
    out: dict[str, Sharded] = {}
    for tensor, pieces in tensors:
        for piece in pieces:
            held = out.setdefault(piece.name, Sharded(piece.global_shape, []))
            held.boxes.append(Box(piece.global_offset, piece.view(tensor)))
    return out


def boxes_of_range(flat: Tensor, pieces: Sequence[Piece], local_shape: Shape, start: int) -> dict[str, Sharded]:
    """The same for a slice of a flattened local tensor, as ZeRO cuts it.

    `flat` holds elements [start, start + len(flat)) of the local tensor in row-major order. The range is cut into at
    most 2 * axes - 1 rectangles, and each is intersected with each piece.
    """
    out: dict[str, Sharded] = {}
    for low, extent, first in rectangles(local_shape, start, start + flat.numel()):
        block = flat[first - start : first - start + math.prod(extent)].view(extent)
        for piece in pieces:
            begin = tuple(map(max, low, piece.local_start))
            end = tuple(
                min(a + n, b + m) for a, n, b, m in zip(low, extent, piece.local_start, piece.shape, strict=True)
            )
            if any(b >= e for b, e in zip(begin, end, strict=True)):
                continue
            inner = block[tuple(slice(b - a, e - a) for b, e, a in zip(begin, end, low, strict=True))]
            offset = tuple(g + b - s for g, b, s in zip(piece.global_offset, begin, piece.local_start, strict=True))
            out.setdefault(piece.name, Sharded(piece.global_shape, [])).boxes.append(Box(offset, inner))
    return out


def rectangles(shape: Shape, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Cut the row-major range [start, stop) of `shape` into rectangles: (first index, extent, first flat position)."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield ((start,) if shape else ()), ((stop - start,) if shape else ()), start
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows are [first, last)
    if first > last:  # the range lies inside one row
        yield from _row_part(shape, start // row, start, stop)
        return
    if start < first * row:
        yield from _row_part(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), first * row
    if last * row < stop:
        yield from _row_part(shape, last, last * row, stop)


def _row_part(shape: Shape, row: int, start: int, stop: int) -> Iterator[tuple[Shape, Shape, int]]:
    base = row * math.prod(shape[1:])
    for low, extent, first in rectangles(shape[1:], start - base, stop - base):
        yield (row, *low), (1, *extent), first + base


def cut(shape: Shape, max_elements: int) -> Iterator[tuple[Shape, Shape]]:
    """Cut a box into boxes (offset, shape) of at most `max_elements`, contiguous in row-major order and in that order.

    The parts are equal and a power of two in number, as far as that goes: cuts by other powers of two, which are what
    most layouts make, then fall on the same places.
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
        for offset, extent in cut(inner, max_elements):
            yield (*offset[:axis], offset[axis] + start, *offset[axis + 1 :]), extent


def slabs(box: Box, max_bytes: int) -> Iterator[Box]:
    """A box as boxes of at most so many bytes, as `cut` cuts it."""
    for start, shape in cut(tuple(box.tensor.shape), max_bytes // box.tensor.element_size()):
        yield Box(tuple(o + s for o, s in zip(box.offset, start, strict=True)), crop(box.tensor, start, shape))


def share_of(
    tensors: Mapping[str, Sharded], rank: int, size: int, max_bytes: int = MAX_SLAB_BYTES
) -> dict[str, Sharded]:
    """Of boxes that `size` ranks hold alike, the part that one of them brings to a checkpoint.

    Together they bring each element once, and each about as many bytes.
    """
    if size == 1:
        return dict(tensors)
    out: dict[str, Sharded] = {}
    loads = [(0, taker) for taker in range(size)]  # a heap
    for name, held in tensors.items():
        for slab in (slab for box in held.boxes for slab in slabs(box, max_bytes)):
            load, taker = loads[0]
            heapq.heapreplace(loads, (load + slab.tensor.nbytes, taker))
            if taker == rank:
                out.setdefault(name, Sharded(held.shape, [])).boxes.append(slab)
    return out


def merge(parts: Iterable[Mapping[str, Sharded]]) -> dict[str, Sharded]:
    """Join several {name: Sharded} into one, appending boxes of the same tensor."""
    out: dict[str, Sharded] = {}
    for part in parts:
        for name, held in part.items():
            out.setdefault(name, Sharded(held.shape, [])).boxes.extend(held.boxes)
    return out


def copy_overlap(destination: Box, source: Box) -> int:
    """Copy what the two boxes share of the global tensor; returns the number of elements copied."""
    begin = tuple(map(max, destination.offset, source.offset))
    end = tuple(
        min(a + n, b + m)
        for a, n, b, m in zip(
            destination.offset, destination.tensor.shape, source.offset, source.tensor.shape, strict=True
        )
    )
    if any(b >= e for b, e in zip(begin, end, strict=True)):
        return 0
    to, of = (
        tuple(slice(b - o, e - o) for b, e, o in zip(begin, end, box.offset, strict=True))
        for box in (destination, source)
    )
    with torch.no_grad():
        destination.tensor[to].copy_(source.tensor[of])
    return math.prod(e - b for b, e in zip(begin, end, strict=True))
