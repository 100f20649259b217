from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from mega_common.errors import TrainingError
from mega_trainer.job.error_translation import convert_oom_and_lost_rank_errors
from mega_trainer.plan.memory_advice import MemoryAdvice, PredictedMemoryNeeds

NEEDS = PredictedMemoryNeeds(
    {"weights": 16 * 10**9, "gradients": 8 * 10**9, "optimizer": 0, "activations": 40 * 10**9},
    [
        MemoryAdvice(("optimizer.offload=true",), 30 * 10**9),
        MemoryAdvice(("recompute=selective",), 20 * 10**9),
        MemoryAdvice(("parallel.tp=2", "parallel.sp=true"), 9 * 10**9),
    ],
)
CLOSED = (
    "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:26000. This is typically caused by"
)


@pytest.mark.parametrize(
    ("error", "words", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"),
         "out of memory on cuda:1: cannot allocate 2.50 GiB more, 1GB of 80GB are free\n"
         "  used: tensors 70GB, other than predicted 6GB, communicators, CUDA and other processes 5GB, torch's free blocks 4GB\n"
         "  predicted peak of this rank: activations 40GB, weights 16GB, gradients 8GB",
         "--set optimizer.offload=true (30GB), recompute=selective (20GB), parallel.tp=2 parallel.sp=true (9GB)"),
        (MemoryError(), "out of memory on the host\n  used: ", "--set recompute=selective (20GB)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2000000000 bytes. Error code 12"),
         "out of memory on the host: cannot allocate 2GB more\n  used: ", "--find-micro-batch"),
        (RuntimeError(CLOSED), "lost the connection to other ranks (Connection closed by peer [127.0.0.1]:26000)", "last checkpoint"),
        (dist.DistBackendError("NCCL error: remote process exited\nmore"), "lost the connection to other ranks (NCCL error: remote process exited)",
         "the rank that ended first"),
    ],
)  # fmt: skip
def test_what_befalls_a_rank_is_told_with_place_and_advice(
    error: Exception, words: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 70 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 74 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 80 * 10**9))
    with pytest.raises(TrainingError) as told, convert_oom_and_lost_rank_errors(3, lambda: "step 12", lambda: NEEDS):
        raise error
    assert told.value.message.startswith(f"rank 3 on {socket.gethostname()}, step 12: ")
    assert words in told.value.message
    assert advice in str(told.value.hint)
    assert told.value.__cause__ is error


def test_an_allocation_that_cannot_be_is_told() -> None:
    with (
        pytest.raises(TrainingError, match=r"out of memory on the host: cannot allocate .*B more"),
        convert_oom_and_lost_rank_errors(0, str, lambda: NEEDS),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), convert_oom_and_lost_rank_errors(0, str, lambda: NEEDS):
        raise RuntimeError("shapes differ")
