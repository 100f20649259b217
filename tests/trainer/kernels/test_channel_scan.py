"""Mamba-1's scan in chunks against its recurrence, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.channel_scan import channel_scan
from mega_trainer.kernels.selective_scan import ScanInputs
from mega_trainer.kernels.sequence_chunks import SequenceChunks
from mega_trainer.parallel.recurrent_state import pass_recurrent_states

B, S, CHANNELS, N = 2, 23, 3, 4


def one_by_one(given: ScanInputs, documents: Tensor | None) -> Tensor:
    state, out = given.d.new_zeros(B, CHANNELS, N), []
    for t in range(S):
        if documents is not None and t:
            state = state * (documents[:, t] == documents[:, t - 1])[:, None, None]
        added = (given.d * given.x.squeeze(-1))[:, t, :, None] * given.b[:, t]
        state = (given.d[:, t, :, None] * given.decay).exp() * state + added
        out.append((state * given.c[:, t]).sum(-1, keepdim=True))
    return torch.stack(out, 1)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 7, 23, 64])
def test_any_cut_into_chunks_is_the_recurrence(size: int, closed: bool) -> None:
    x, b, c = (torch.randn(B, S, *shape, dtype=torch.float64) for shape in ((CHANNELS, 1), (1, N), (1, N)))
    d, decay = torch.rand(B, S, CHANNELS, dtype=torch.float64), -2 * torch.rand(CHANNELS, N, dtype=torch.float64)
    leaves = [part.requires_grad_() for part in (x, d, decay, b, c)]
    given = ScanInputs(*leaves)
    documents = (torch.rand(B, S) < 0.2).cumsum(1) if closed else None
    reach = None
    if documents is not None:
        reach = torch.stack([(row[:, None] == row[None, :]).tril().sum(1) - 1 for row in documents])
    y = channel_scan(
        given,
        SequenceChunks(1, size, reach),
        lambda maps, added: pass_recurrent_states(maps, added, None, CommGroup("cp"))[0],
    )
    expected, weights = one_by_one(given, documents), torch.randn(B, S, CHANNELS, 1, dtype=torch.float64)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    for mine, theirs in zip(torch.autograd.grad((y * weights).sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
