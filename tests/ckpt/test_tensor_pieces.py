"""A piece says where a rectangle of a local tensor lives; everything else is built on that."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mega_ckpt.tensor_pieces import (
    ShardedTensor,
    TensorBox,
    TensorPiece,
    TensorShape,
    boxes_by_name,
    copy_overlap,
    map_flat_range_to_sharded_tensors,
    merge_sharded_tensors,
    select_replica_share,
    split_slice_by_elements,
)

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: TensorShape) -> tuple[TensorShape, TensorShape]:
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))


def numbered(shape: TensorShape, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + math.prod(shape)).view(shape)


def gathered(sharded: ShardedTensor) -> torch.Tensor:
    """The global tensor, -1 where no box is; a place that two boxes claim fails."""
    whole = torch.full(sharded.shape, -1)
    for box in sharded.boxes:
        place = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.tensor.shape, strict=True))]
        assert (place == -1).all()
        place.copy_(box.tensor)
    return whole


def fused(rows: tuple[int, int], columns: int, split: int, part: int) -> tuple[torch.Tensor, list[TensorPiece]]:
    """A fused two-matrix projection whose rows are split over `split` ranks, as rank `part` holds it."""
    pieces, local_row = [], 0
    for name, count in zip("ab", rows, strict=True):
        mine = count // split
        pieces.append(TensorPiece(name, (count, columns), (part * mine, 0), (local_row, 0), (mine, columns)))
        local_row += mine
    return numbered((local_row, columns)), pieces


def test_a_whole_tensor_is_one_piece() -> None:
    tensor = numbered((2, 3))
    sharded = boxes_by_name([(tensor, [TensorPiece.whole_tensor("w", (2, 3))])])
    assert torch.equal(gathered(sharded["w"]), tensor)
    assert sharded["w"].boxes[0].tensor.data_ptr() == tensor.data_ptr()


def test_a_piece_outside_its_tensor_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="outside"):
        TensorPiece("w", (4,), (3,), (0,), (2,))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_ranks_of_a_fused_projection_make_up_both_tensors(a: int, b: int, columns: int, split: int) -> None:
    rows = (a * split, b * split)
    held = merge_sharded_tensors(boxes_by_name([fused(rows, columns, split, part)]) for part in range(split))
    whole = [gathered(held["a"]), gathered(held["b"])]
    locals_ = [fused(rows, columns, split, part)[0] for part in range(split)]
    assert torch.equal(whole[0], torch.cat([local[:a] for local in locals_]))
    assert torch.equal(whole[1], torch.cat([local[a:] for local in locals_]))


@given(st.data(), shapes)
def test_a_flat_range_becomes_few_boxes_that_hold_just_its_elements(data: st.DataObject, shape: TensorShape) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    flat = numbered((size,))[start:stop]
    out = map_flat_range_to_sharded_tensors(flat, [TensorPiece.whole_tensor("w", shape)], shape, start)
    expected = torch.full((size,), -1)
    expected[start:stop] = flat
    sharded = out.get("w", ShardedTensor(shape, []))
    assert torch.equal(gathered(sharded).reshape(-1), expected)
    assert len(sharded.boxes) <= max(1, 2 * len(shape) - 1)
    for box in sharded.boxes:
        assert box.tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 2))
def test_flat_ranges_of_a_fused_projection_make_up_the_same_as_the_tensor(
    data: st.DataObject, a: int, b: int, columns: int, split: int
) -> None:
    part = data.draw(st.integers(0, split - 1))
    local, pieces = fused((a * split, b * split), columns, split, part)
    marks = sorted(data.draw(st.lists(st.integers(0, local.numel()), max_size=3)))
    ends = [0, *marks, local.numel()]
    ranges = [
        map_flat_range_to_sharded_tensors(local.view(-1)[start:stop], pieces, tuple(local.shape), start)
        for start, stop in itertools.pairwise(ends)
    ]
    together, whole = merge_sharded_tensors(ranges), boxes_by_name([(local, pieces)])
    for name in "ab":
        assert torch.equal(gathered(together[name]), gathered(whole[name]))


@given(st.data(), shapes.filter(bool))
def test_copy_overlap_copies_what_both_hold(data: st.DataObject, shape: TensorShape) -> None:
    whole = numbered(shape)
    (to, to_shape), (of, of_shape) = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    at = [tuple(slice(o, o + n) for o, n in zip(*box, strict=True)) for box in ((to, to_shape), (of, of_shape))]
    destination = torch.full(to_shape, -1)
    count = copy_overlap(TensorBox(to, destination), TensorBox(of, whole[at[1]]))
    masked = torch.full(shape, -1)
    masked[at[1]] = whole[at[1]]
    assert torch.equal(destination, masked[at[0]])
    assert count == int((destination >= 0).sum())


@given(shapes, st.integers(1, 40))
def test_cut_gives_contiguous_parts_in_order(shape: TensorShape, limit: int) -> None:
    whole = numbered(shape)
    parts = [
        whole[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
        for offset, extent in split_slice_by_elements(shape, limit)
    ]
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), whole.reshape(-1))
    assert all(part.numel() <= limit for part in parts)


def test_cut_falls_where_other_powers_of_two_cut() -> None:
    assert [offset for offset, _ in split_slice_by_elements((64, 3), 64 * 3 // 3)] == [
        (0, 0),
        (16, 0),
        (32, 0),
        (48, 0),
    ]


@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 5), st.integers(8, 400))
def test_ranks_that_hold_the_same_bring_each_element_once(held: list[TensorShape], size: int, max_bytes: int) -> None:
    tensors = {
        str(i): ShardedTensor(shape, [TensorBox((0,) * len(shape), numbered(shape))]) for i, shape in enumerate(held)
    }
    shares = [select_replica_share(tensors, rank, size, max_bytes) for rank in range(size)]
    for name, sharded in merge_sharded_tensors(shares).items():
        assert torch.equal(gathered(sharded), tensors[name].boxes[0].tensor)
    assert merge_sharded_tensors(shares).keys() == tensors.keys()
    bytes_of = [sum(box.tensor.nbytes for held in share.values() for box in held.boxes) for share in shares]
    if size > 1:
        assert max(bytes_of) - min(bytes_of) <= max_bytes
