"""A forward and a backward in turn: who runs when, what they compute, and how they end."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from mega_trainer.distributed.comm import CommGroup, CompletedCollective
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.parallel import async_all_to_all
from mega_trainer.parallel.expert_parallel import AllToAllDispatcher, run_through_experts
from mega_trainer.parallel.pass_interleaver import PassInterleaver


def test_each_runs_until_its_wait_and_the_longer_one_to_its_end() -> None:
    interleaver, order = PassInterleaver(), []

    def run(name: str, waits: int) -> str:
        for number in range(waits):
            order.append(f"{name}{number}")
            interleaver.interleave_wait(CompletedCollective()).wait()
        order.append(name)
        return name

    for _ in range(2):  # nothing of a pair is left for the next
        order.clear()
        assert interleaver.run_pair(lambda: run("f", 1), lambda: run("b", 3)) == "f"
        assert order == ["f0", "b0", "f", "b1", "b2", "b"]
        order.clear()
        interleaver.run_pair(lambda: run("f", 2), lambda: run("b", 0))
        assert order == ["f0", "b", "f1", "f"]
    interleaver.switch_pass()  # alone


@pytest.mark.parametrize("failing", ["forward", "backward"])
@pytest.mark.parametrize("waits", [0, 1, 2])
def test_an_error_of_one_ends_both(failing: str, waits: int) -> None:
    interleaver, ended = PassInterleaver(), []

    def run(name: str) -> None:
        for number in range(4):
            if name == failing and number == waits:
                raise ValueError(name)
            interleaver.switch_pass()
        ended.append(name)

    with pytest.raises(ValueError, match=failing):
        interleaver.run_pair(lambda: run("forward"), lambda: run("backward"))
    assert not ended
    assert interleaver.run_pair(lambda: 1, lambda: None) == 1


def _experts(x: Tensor, weights: Tensor, rows: GroupedRows) -> Tensor:
    return x.square() * weights.unsqueeze(-1)


def _alternate() -> tuple[list[str], bool]:
    """The exchanges of one forward beside one backward, by pass; and whether both computed what they compute alone."""
    interleaver, started = PassInterleaver(), list[str]()
    dispatcher = AllToAllDispatcher(
        4, CommGroup("ep", (0, 1), dist.get_rank(), dist.group.WORLD), bound=2.0, interleaver=interleaver
    )
    g = torch.Generator().manual_seed(dist.get_rank())
    chosen = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(6)])
    inputs = [torch.rand(6, 3, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2)]

    def forward(x: Tensor) -> Tensor:
        dispatch = dispatcher.dispatch_tokens(x, chosen, torch.full((6, 2), 0.5, dtype=torch.float64))
        return run_through_experts(dispatch, _experts)[0]

    ys = [forward(x) for x in inputs]
    alone = [torch.autograd.grad(y.sum(), x)[0] for x, y in zip(inputs, ys, strict=True)]
    waiting, real = forward(inputs[1]), async_all_to_all.all_to_all_into

    def recorded(*args: object, **options: object) -> object:
        started.append("f" if threading.current_thread() is threading.main_thread() else "b")
        return real(*args, **options)

    with mock.patch.object(async_all_to_all, "all_to_all_into", recorded):
        y = interleaver.run_pair(lambda: forward(inputs[0]), lambda: waiting.sum().backward())
    gradients = [torch.autograd.grad(y.sum(), inputs[0])[0], inputs[1].grad]
    same = [torch.equal(*both) for both in [(y, ys[0]), *zip(gradients, alone, strict=True)]]
    return started, all(same)


def test_exchanges_alternate_and_values_are_those_of_each_alone() -> None:
    """A forward sends routing and tokens, then outputs; a backward sends gradients of outputs, then of tokens."""
    for started, same in run_ranks(_alternate, 2):
        assert same
        assert started == ["f", "f", "b", "f", "b"]
