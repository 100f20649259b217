"""Split layers against whole ones: outputs, gradients of inputs and of weights, with and without sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor, nn

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.parallel.parameter_info import get_parameter_info
from mega_trainer.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    SplitHeads,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    get_fused_heads_layout,
    local_sequence_slice,
    make_vocab_parameter,
    vocab_rows_per_rank,
)

RANKS, B, S, D, N, V = 4, 2, 8, 6, 12, 13
KERNELS = TorchKernels()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.clone())


def tp() -> CommGroup:
    return CommGroup("tp", tuple(range(RANKS)), dist.get_rank(), dist.group.WORLD)


def own(tensor: Tensor, rank: int, dim: int) -> Tensor:
    return tensor.chunk(RANKS, dim)[rank]


def run(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor | None]:
    """Output, gradient of the input, gradients of the parameters."""
    y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def column(rank: int, sp: bool) -> tuple[list[Any], list[Any]]:
    """(what this rank computes, what it should)."""
    weight, bias, x, dy = drawn(N, D), drawn(N, seed=1), drawn(B, S, D, seed=2), drawn(B, S, N, seed=3)
    whole = ColumnParallelLinear(KERNELS, [parameter(weight)], [parameter(bias)], CommGroup("tp"), sp=False)
    y, dx, dw, db = run(whole, x.clone().requires_grad_(), dy)
    # two weights of different widths used as one, as with shared key/value heads
    weights = [parameter(part) for part in own(weight, rank, 0).split([1, 2])]
    split = ColumnParallelLinear(KERNELS, weights, [parameter(own(bias, rank, 0))], tp(), sp=sp)
    mine = (own(x, rank, 1) if sp else x).clone().requires_grad_()
    found = run(split, mine, own(dy, rank, 2))
    expected = [own(y, rank, 2), own(dx, rank, 1) if sp else dx, *own(dw, rank, 0).split([1, 2]), own(db, rank, 0)]
    return found, expected


def row(rank: int, sp: bool) -> tuple[list[Any], list[Any]]:
    weight, bias, x, dy = drawn(D, N), drawn(D, seed=1), drawn(B, S, N, seed=2), drawn(B, S, D, seed=3)
    y, dx, dw, db = run(RowParallelLinear(KERNELS, parameter(weight), parameter(bias), CommGroup("tp"), sp=False),
                        x.clone().requires_grad_(), dy)  # fmt: skip
    split = RowParallelLinear(KERNELS, parameter(own(weight, rank, 1)), parameter(bias), tp(), sp=sp)
    found = run(split, own(x, rank, 2).clone().requires_grad_(), own(dy, rank, 1) if sp else dy)
    # under sequence parallelism each rank has the bias gradient of its tokens, to be summed with the others'
    db = own(dy, rank, 1).sum((0, 1)) if sp else db
    return found, [own(y, rank, 1) if sp else y, own(dx, rank, 2), own(dw, rank, 1), db]


def embedding(rank: int, sp: bool) -> tuple[list[Any], list[Any]]:
    table, dy = drawn(V, D), drawn(B, S, D, seed=3)
    tokens = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(4))
    whole = VocabParallelEmbedding(parameter(table), CommGroup("tp"), sp=False)
    y = whole(tokens)
    y.backward(dy)
    rows = -(-V // RANKS)
    padded = torch.cat([table, drawn(rows * RANKS - V, D, seed=9)])
    split = VocabParallelEmbedding(parameter(own(padded, rank, 0)), tp(), sp=sp)
    z = split(tokens)
    z.backward(own(dy, rank, 1) if sp else dy)
    gradient = torch.cat([whole.weight.grad, torch.zeros(rows * RANKS - V, D, dtype=torch.float64)])
    return [z.detach(), split.weight.grad], [own(y, rank, 1) if sp else y, own(gradient, rank, 0)]


def ends(rank: int, sp: bool) -> tuple[list[Any], list[Any]]:
    """The head's input: each rank's gradient is a part, of all tokens."""
    x, dy = drawn(B, S, D), drawn(RANKS, B, S, D, seed=1)
    mine = (own(x, rank, 1) if sp else x).clone().requires_grad_()
    y = gather_from_sequence_parallel_region(mine, tp(), sp=sp)
    y.backward(dy[rank])
    total = dy.sum(0)
    return [y.detach(), mine.grad], [x, own(total, rank, 1) if sp else total]


LAYERS = {"column": column, "row": row, "embedding": embedding, "ends": ends}


def everything() -> dict[str, list[float]]:
    """The largest error of each layer's tensors."""
    rank = dist.get_rank()
    out = {}
    for name, layer in LAYERS.items():
        for sp in (False, True):
            pairs = zip(*layer(rank, sp), strict=True)
            out[f"{name} {sp}"] = [(a - b).abs().max().item() if a.shape == b.shape else 1e9 for a, b in pairs]
    return out


def test_split_layers_compute_what_whole_ones_compute() -> None:
    for found in run_ranks(everything, RANKS):
        assert set(found) == {f"{name} {sp}" for name in LAYERS for sp in (False, True)}
        assert all(error < 1e-13 for errors in found.values() for error in errors), found


def ranks_of(size: int) -> list[CommGroup]:
    return [CommGroup("tp", tuple(range(size)), rank) for rank in range(size)]


@given(st.integers(1, 40), st.integers(1, 8))
def test_a_vocabulary_is_split_in_equal_rows_and_padding_is_in_no_piece(vocab: int, size: int) -> None:
    numbers = torch.zeros(vocab, 3)
    for group in ranks_of(size):
        made = make_vocab_parameter(
            "head", vocab, 3, group=group, data=CommGroup("dp"), dtype=torch.float32, device=torch.device("cpu")
        )
        assert made.shape == (vocab_rows_per_rank(vocab, group), 3)
        for piece in get_parameter_info(made).pieces:
            numbers[piece.global_offset[0] : piece.global_offset[0] + piece.shape[0]] += 1
            assert piece.global_offset[0] == group.rank * made.shape[0]  # as a token's owner is found
    assert (numbers == 1).all()


@pytest.mark.parametrize("tail", [(), (5,)])
def test_fused_heads_lie_block_after_block_and_a_head_on_as_many_ranks_as_there_are_more(tail: tuple[int, ...]) -> None:
    blocks = [SplitHeads("q", 8), SplitHeads("k", 4), SplitHeads("v", 2, 3)]
    for group in ranks_of(4):
        shape, pieces = get_fused_heads_layout(blocks, tail, group)
        assert shape == [6, *tail]
        assert [piece.name for piece in pieces] == ["q", "k", "v"]
        assert [piece.global_shape for piece in pieces] == [(8, *tail), (4, *tail), (6, *tail)]
        assert [piece.local_start[0] for piece in pieces] == [0, 2, 3]
        assert [piece.global_offset[0] for piece in pieces] == [2 * group.rank, group.rank, group.rank // 2 * 3]
        assert [piece.shape[0] for piece in pieces] == [2, 1, 3]


def test_parts_of_a_sequence() -> None:
    parts = [local_sequence_slice(12, group, sp=True) for group in ranks_of(3)]
    assert [list(range(12)[part]) for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(local_sequence_slice(12, group, sp=False) == slice(None) for group in ranks_of(3))
