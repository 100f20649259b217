from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.selective_scan import ScanInputs, selective_scan
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.parallel.recurrent_state import pass_recurrent_states, scan_affine_maps

B, S, H, P, G, N = 2, 23, 4, 3, 2, 5


def steps(tokens: int = S, dtype: torch.dtype = torch.float64) -> ScanInputs:
    d = torch.rand(B, tokens, H, dtype=dtype)
    x, b, c = (torch.randn(B, tokens, *shape, dtype=dtype) for shape in ((H, P), (G, N), (G, N)))
    made = ScanInputs(x, d, -2 * torch.rand(H, dtype=dtype), b, c)
    for part in (made.x, made.d, made.b, made.c):
        part.requires_grad_()
    return made


def reach_of(documents: Tensor) -> Tensor:
    """int64 [B, S] from the number of each token's document."""
    return torch.stack([(row[:, None] == row[None, :]).tril().sum(1) - 1 for row in documents])


def one_by_one(given: ScanInputs, documents: Tensor | None = None) -> Tensor:
    """The recurrence as it is written."""
    state = given.x.new_zeros(B, H, P, N)
    b, c = (part.repeat_interleave(H // G, 2) for part in (given.b, given.c))
    out = []
    for t in range(given.x.shape[1]):
        if documents is not None and t:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        added = (given.d[:, t, :, None] * given.x[:, t])[..., None] * b[:, t, :, None, :]
        state = (given.d[:, t] * given.decay).exp()[..., None, None] * state + added
        out.append((state * c[:, t, :, None, :]).sum(-1))
    return torch.stack(out, 1)


def passed(maps: Tensor, added: Tensor) -> Tensor:
    return pass_recurrent_states(maps, added, None, CommGroup("cp"))[0]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7, 23, 64])
def test_any_cut_into_chunks_is_the_recurrence(size: int, closed: bool) -> None:
    given = steps()
    documents = (torch.rand(B, S) < 0.2).cumsum(1) if closed else None
    chunks = SequenceChunks(1, size, None if documents is None else reach_of(documents))
    weights, leaves = torch.randn(B, S, H, P, dtype=torch.float64), (given.x, given.d, given.b, given.c)
    y, expected = selective_scan(given, chunks, passed), one_by_one(given, documents)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad((y * weights).sum(), leaves, retain_graph=True),
        torch.autograd.grad((expected * weights).sum(), leaves), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_what_is_narrow_is_computed_in_fp32(dtype: torch.dtype, error: float) -> None:
    given = steps()
    low = ScanInputs(given.x.to(dtype), given.d.float(), given.decay.float(), given.b.to(dtype), given.c.to(dtype))
    y = selective_scan(low, SequenceChunks(1, 8), passed)
    assert y.dtype == torch.float32
    expected = one_by_one(given)
    assert (y - expected).abs().max() <= error * expected.abs().max()


def test_long_decays_neither_overflow_nor_lose_what_is_near() -> None:
    given = steps()
    fast = ScanInputs(given.x, given.d, given.decay * 1e4, given.b, given.c)
    torch.testing.assert_close(
        selective_scan(fast, SequenceChunks(1, 16), passed), one_by_one(fast), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("matrices", [False, True])
def test_the_gradient_of_a_fold_is_that_of_its_steps(matrices: bool) -> None:
    shape = (2, 3) if matrices else (1, 1)
    maps = torch.randn(2, 4, 3, *((3, 3) if matrices else shape), dtype=torch.float64, requires_grad=True)
    added = torch.randn(2, 4, 3, 3, 2, dtype=torch.float64, requires_grad=True)
    first = torch.randn(2, 3, 3, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(partial(scan_affine_maps), (maps, added, first))
