"""Context parallelism: where tokens lie, and attention of all ranks against attention of one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor

from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.attention_masks import materialize_dense_mask
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform
from mega_trainer.kernels.torch_kernels import TorchKernels, reference_attention
from mega_trainer.model.forward_context import SequenceMask
from mega_trainer.parallel import context_parallel
from mega_trainer.parallel.context_parallel import (
    BlockwiseAttention,
    ContextParallelKind,
    RingKeyValueExchange,
    get_context_rank_chunks,
    get_context_rank_token_indices,
    make_context_parallel_attention,
)

RANKS = 4
CPU = torch.device("cpu")


def group(rank: int, size: int) -> CommGroup:
    return CommGroup("cp", tuple(range(size)), rank)


@given(st.integers(1, 6), st.integers(1, 5))
def test_every_token_lies_on_one_rank(size: int, chunk: int) -> None:
    length = 2 * size * chunk
    places = [get_context_rank_token_indices(length, group(rank, size)) for rank in range(size)]
    assert torch.cat(places).sort().values.equal(torch.arange(length))
    if size > 1:
        for rank, mine in enumerate(places):
            assert mine.tolist() == [place for part in get_context_rank_chunks(rank, length, size) for place in part]


@given(st.integers(2, 6), st.integers(1, 4))
def test_every_rank_has_as_many_scores_to_compute(size: int, chunk: int) -> None:
    length = 2 * size * chunk
    sizes = set()
    for rank in range(size):
        mine = get_context_rank_token_indices(length, group(rank, size))
        sizes.add(int((mine + 1).sum()))
    assert len(sizes) == 1


@given(
    st.integers(2, 4),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 20)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.randoms(),
)
def test_blocks_are_cut_from_the_whole_mask_and_none_that_matters_is_skipped(
    size, chunk, window, closed, causal, pictured, rng
) -> None:
    length = 2 * size * chunk
    ids = np.sort([[rng.randint(0, 2) for _ in range(length)] for _ in range(2)])
    images = np.array([[causal and pictured and rng.random() < 0.7 for _ in range(length)] for _ in range(2)])
    outline = DocumentBounds.from_positions(ids, ids if closed else None, images)
    sight = SequenceMask(length, CPU, outline.document_starts, causal, outline.bidirectional_blocks)
    whole = (
        materialize_dense_mask(sight.mask_for_window(window), ids.shape, length, CPU)
        .expand(len(ids), -1, -1, -1)
        .clone()
    )
    for row, block in outline.bidirectional_blocks:
        for i in block:
            whole[row, 0, i, i : block.stop] = True
    seen = torch.zeros_like(whole, memory_format=torch.contiguous_format)
    for mine in range(size):
        kind = BlockwiseAttention(RingKeyValueExchange(group(mine, size)), group(mine, size), TorchKernels())
        for other in range(size):
            rows, columns = (get_context_rank_token_indices(length, group(r, size)) for r in (mine, other))
            for block in kind.visible_blocks(length, other, partial(sight.list_mask_blocks, window=window)):
                here, there = rows[block.queries], columns[block.keys]
                square = materialize_dense_mask(block.mask, (len(ids[block.rows]), len(here)), len(there), CPU)
                assert square.any(-1).all()  # no query without a key
                region = seen[block.rows, 0][:, here[:, None], there[None, :]]
                assert not (region & square[:, 0]).any()  # nothing twice
                seen[block.rows, 0] = seen[block.rows, 0].index_put(
                    (torch.arange(len(region))[:, None, None], here[:, None], there[None, :]),
                    region | square[:, 0],
                )
    assert seen.equal(whole)


def test_blocks_that_nobody_sees_into_are_skipped() -> None:
    """Eight chunks on four ranks: rank 1 has the chunks 1 and 6."""
    size, length = 4, 64
    ids = np.repeat([[0, 1], [0, 1]], [40, 24], axis=1)  # the second document begins with chunk 5
    open_, closed = (
        SequenceMask(length, CPU, begins) for begins in (None, DocumentBounds.from_positions(ids, ids).document_starts)
    )
    kind = BlockwiseAttention(RingKeyValueExchange(group(1, size)), group(1, size), TorchKernels())

    def sizes(sight: SequenceMask, window: int | None) -> list[tuple[int, int, int]]:
        """Rows, queries and keys of each block."""
        found = [
            kind.visible_blocks(length, rank, partial(sight.list_mask_blocks, window=window)) for rank in range(size)
        ]
        tokens = range(length // size)
        return [(len(ids[b.rows]), len(tokens[b.queries]), len(tokens[b.keys])) for blocks in found for b in blocks]

    assert sizes(open_, None) == [(2, 16, 8), (2, 16, 16), (2, 8, 16), (2, 8, 16)]  # one for each rank
    assert sizes(open_, 5) == [
        (2, 4, 4),
        (2, 8, 8),
        (2, 8, 8),
        (2, 4, 4),
    ]  # of each chunk and the end of the one before
    assert sizes(closed, None) == [(1, 8, 8)] * 2 + [(2, 8, 8)] * 2 + [(1, 8, 8)] * 2  # chunk 0, itself, and chunk 5
    assert sizes(closed, 5) == [(1, 4, 4)] * 2 + [(2, 8, 8)] * 2 + [(1, 4, 4)] * 2
    assert sizes(SequenceMask(length, CPU, causal=False), None) == [(2, 16, 16)] * size


def test_order_of_ranks_and_of_the_sequence() -> None:
    size, length = 3, 12
    parts = torch.stack([get_context_rank_token_indices(length, group(rank, size)) for rank in range(size)])[
        :, None, :, None
    ]
    assert context_parallel._sequence_order(parts).flatten().equal(torch.arange(length))
    assert context_parallel._rank_order(context_parallel._sequence_order(parts), size).equal(parts)


@dataclass
class Recorded:
    """A ring of which one rank is seen: what it does, in order."""

    done: list[str]

    def start(self, tensor: Tensor, group: CommGroup) -> Recorded:
        self.done.append(f"start {tensor.item():.0f}")
        return Recorded(self.done)

    def wait(self) -> Tensor:
        self.done.append("wait")
        return torch.tensor([2.0])


def test_what_comes_next_is_on_its_way_while_a_block_is_computed() -> None:
    for gradient, expected in {
        False: ["start 1", "work 1", "wait", "start 2", "work 0", "wait", "work 2"],
        True: [
            "start 1", "work 1", "start 100", "wait",  # keys under way, then my part of their gradient
            "start 2", "work 0", "wait", "start 102", "wait",  # the gradient so far is awaited after mine is computed
            "work 2", "wait", "start 102", "wait",  # the sum of the last rank goes home
        ],
    }.items():  # fmt: skip
        recorded, ring = Recorded([]), RingKeyValueExchange(group(1, 3))

        def work(rank: int, packed: Tensor, done: list[str] = recorded.done) -> Tensor:
            done.append(f"work {rank}")
            return torch.tensor([100.0])

        with mock.patch.object(context_parallel, "start_ring_transfer", recorded.start):
            (ring.collect_gradients if gradient else ring.visit_all_ranks)(torch.tensor([1.0]), work)  # type: ignore[arg-type]
        assert recorded.done == expected


@dataclass(frozen=True)
class Shape:
    """One attention: sizes as in the module's legend."""

    heads: int = 4
    keys: int = 2
    d: int = 6
    e: int = 6
    window: int | None = None
    closed: bool = False
    causal: bool = True
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float64


SHAPES = {
    "plain": Shape(),
    "each head its own key": Shape(keys=4),
    "one key": Shape(keys=1),
    "values of another size": Shape(keys=4, d=6, e=3),
    "window": Shape(window=5),
    "documents": Shape(closed=True),
    "all": Shape(window=9, closed=True, softcap=1.5, sinks=True, e=10),
    "sinks": Shape(sinks=True),
    "to both sides": Shape(causal=False),
    "all to both sides": Shape(causal=False, window=6, closed=True, softcap=1.5, sinks=True),
    "bf16": Shape(sinks=True, dtype=torch.bfloat16),
}
LENGTH, ROWS = 24, 2


def tensors(shape: Shape) -> tuple[list[Tensor], Tensor, SequenceMask]:
    """q, k, v and sinks; the gradient of y; who sees whom. Whole."""
    g = torch.Generator().manual_seed(5)
    sizes = [(shape.heads, shape.d), (shape.keys, shape.d), (shape.keys, shape.e)]
    made = [torch.randn(ROWS, LENGTH, *size, generator=g, dtype=torch.float64).to(shape.dtype) for size in sizes]
    made += [torch.randn(shape.heads, generator=g, dtype=torch.float64).to(shape.dtype)] if shape.sinks else []
    dy = torch.randn(ROWS, LENGTH, shape.heads, shape.e, generator=g, dtype=torch.float64).to(shape.dtype)
    documents = (torch.rand(ROWS, LENGTH, generator=g) < 0.2).cumsum(-1).numpy()
    begins = DocumentBounds.from_positions(documents, documents).document_starts if shape.closed else None
    return made, dy, SequenceMask(LENGTH, CPU, begins, shape.causal)


def at_once(shape: Shape) -> list[Tensor]:
    """y and the gradients of all operands, on one rank, in fp64 whatever the precision."""
    made, dy, sight = tensors(shape)
    operands = [t.double().requires_grad_() for t in made]
    how = AttentionScoreTransform(0.7, shape.softcap, operands[3] if shape.sinks else None)
    y = reference_attention(*operands[:3], sight.mask_for_window(shape.window), how)
    y.backward(dy.double())
    return [y.detach(), *(t.grad for t in operands if t.grad is not None)]


def together(kind: ContextParallelKind, shapes: dict[str, Shape]) -> dict[str, list[Tensor]]:
    """The same of a rank's tokens."""
    cp = CommGroup("cp", tuple(range(RANKS)), dist.get_rank(), dist.group.WORLD)
    places, out = get_context_rank_token_indices(LENGTH, cp), {}
    for name, shape in shapes.items():
        made, dy, sight = tensors(shape)
        operands = [t[:, places] for t in made[:3]] + made[3:]
        for t in operands:
            t.requires_grad_()
        how = AttentionScoreTransform(0.7, shape.softcap, operands[3] if shape.sinks else None)
        mask = sight.mask_for_window(shape.window)
        attend = make_context_parallel_attention(kind, cp, TorchKernels())
        assert attend is not None
        y = attend.compute_attention(
            *operands[:3], how, partial(sight.list_mask_blocks, window=shape.window),
            lambda q, k, v, how, first, mask=mask: reference_attention(q, k, v, mask, how),
        )  # fmt: skip
        y.backward(dy[:, places])
        if shape.sinks:
            sinks = operands[3].grad
            assert sinks is not None
            dist.all_reduce(sinks)
        out[name] = [y.detach(), *(t.grad for t in operands if t.grad is not None)]
    return out


@pytest.fixture(scope="module", params=["ring", "allgather", "alltoall"])
def found(request: Any) -> list[dict[str, list[Tensor]]]:
    return run_ranks(together, RANKS, request.param, SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_all_ranks_compute_what_one_does(found: list[dict[str, list[Tensor]]], name: str) -> None:
    shape, expected = SHAPES[name], at_once(SHAPES[name])
    near = {"rtol": 3e-2, "atol": 3e-2} if shape.dtype == torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}
    for rank, mine in enumerate(found):
        places = get_context_rank_token_indices(LENGTH, group(rank, RANKS))
        assert len(mine[name]) == len(expected)
        for part, whole in zip(mine[name], expected, strict=True):
            assert part.dtype == shape.dtype
            torch.testing.assert_close(part.double(), whole[:, places] if whole.dim() > 1 else whole, **near)
