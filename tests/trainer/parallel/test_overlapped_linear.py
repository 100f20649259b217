"""GEMMs in pieces beside their collectives compute what whole GEMMs and collectives compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity.cases import VARIANTS, case
from ranks import run_ranks
from torch import Tensor
from torch.distributed import _symmetric_memory

from mega_trainer.distributed.comm import CommGroup, all_gather, reduce_scatter
from mega_trainer.parallel import overlapped_linear
from mega_trainer.parallel.overlapped_linear import (
    OverlappedGemms,
    RingGemms,
    SymmetricMemoryGemms,
    choose_overlapped_gemms,
)
from mega_trainer.verify.case_comparison import compare_cases_with_one_process, merge_findings_by_case
from mega_trainer.verify.layout_case import LayoutCase

RANKS, B, S, D, N = 4, 2, 8, 6, 5
Case = tuple[int, dict[str, Any]]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def errors_of(gemms: OverlappedGemms, group: CommGroup) -> list[float]:
    """Largest difference of each output from that of one collective and one GEMM; this rank has inputs of its own."""
    part, whole = drawn(B, S // RANKS, D, seed=group.rank), drawn(B, S, D, seed=10 + group.rank)
    matrix = drawn(N, D, seed=20).t()  # not contiguous, as a weight in the forward
    gathered, y = gemms.all_gather_gemm(part, matrix, group, keep_input=True)
    nothing, again = gemms.all_gather_gemm(part, matrix, group)
    assert nothing is None
    assert gathered is not None
    expected = all_gather(part, group, 1)
    summed = reduce_scatter(whole @ matrix, group, 1)
    pairs = [
        (gathered, expected), (y, expected @ matrix), (again, y), (gemms.gemm_reduce_scatter(whole, matrix, group), summed)
    ]  # fmt: skip
    assert all(a.is_contiguous() for a, _ in pairs)
    return [(a - b).abs().max().item() for a, b in pairs]


def both_kinds() -> tuple[list[float], list[float]]:
    """By a ring, and by torch's operators: their own reference implementation, registered for CPUs."""
    group = CommGroup("tp", tuple(range(RANKS)), dist.get_rank(), dist.group.WORLD)
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    return errors_of(RingGemms(), group), errors_of(SymmetricMemoryGemms(), group)


def test_pieces_are_the_whole() -> None:
    for ring, symmetric in run_ranks(both_kinds, RANKS):
        assert max(ring) < 1e-13, ring
        assert max(symmetric) < 1e-13, symmetric


def test_a_piece_is_computed_while_another_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Transfer:
        def __init__(self, piece: Tensor, group: CommGroup) -> None:
            events.append("send")
            self.piece = piece

        def wait(self) -> Tensor:
            events.append("wait")
            return self.piece.clone()

    class Matrix(torch.Tensor):
        def __rmatmul__(self, other: Tensor) -> Tensor:
            events.append("gemm")
            return other.new_zeros(*other.shape[:-1], self.shape[1])

    monkeypatch.setattr(overlapped_linear, "start_ring_transfer", Transfer)
    group, matrix = CommGroup("tp", (0, 1, 2)), torch.zeros(3, 2).as_subclass(Matrix)
    RingGemms().all_gather_gemm(torch.zeros(1, 2, 3), matrix, group)
    assert events == ["send", "gemm", "wait", "send", "gemm", "wait", "gemm"]
    events.clear()
    RingGemms().gemm_reduce_scatter(torch.zeros(1, 6, 3), matrix, group)
    assert events == ["gemm", "send", "gemm", "wait", "send", "gemm", "wait"]


def test_the_ring_is_used_without_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    device, four = torch.device("cuda", 0), CommGroup("tp", (0, 1, 2, 3), 0, object())  # type: ignore[arg-type]
    for devices, reachable, kind in ((8, True, SymmetricMemoryGemms), (8, False, RingGemms), (2, True, RingGemms)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair, reachable=reachable: reachable)
        assert type(choose_overlapped_gemms(device, four)) is kind
    assert type(choose_overlapped_gemms(torch.device("cpu"), four)) is RingGemms


ADAPTER: dict[str, Any] = {"rank": 3, "alpha": 5}
# Layouts of up to four ranks with tensor ranks, and one option of a layer each.
LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("tied", 2, {"tp": 2}, {"recompute": {"kind": "full"}}),
    ("gqa", 4, {"tp": 4}, {"recompute": {"kind": "selective"}, "variant": VARIANTS["gqa"][2]}),
    ("dense", 4, {"tp": 2, "zero": 3}, {"optimizer": "muon"}),
    ("dense", 4, {"tp": 2, "pp": 2, "schedule": "zb-h1"}, {"micro": 2, "lora": ADAPTER | {"dora": True}}),
    ("moe", 4, {"tp": 2, "ep": 2, "expert_tp": 2, "zero": 2}, {"freeze": ["*.self_attn.o_proj.*"]}),
    ("mla", 4, {"tp": 2, "cp": 2}, {}),
    ("hybrid", 4, {"tp": 4}, {"steps": 1}),
    ("t5", 2, {"tp": 2}, {}),
]  # fmt: skip


def overlapped(name: str, ranks: int, parallel: dict[str, Any], options: dict[str, Any], **more: Any) -> LayoutCase:
    shape = {"sp": True, "tp_comm_overlap": True, **parallel}
    return case(name, ranks, layers=2 * parallel.get("pp", 1), parallel=shape, **{"micro": 4, **options, **more})


def test_layouts_with_overlapped_products() -> None:
    cases = [overlapped(*one, steps=1) for one in LAYOUTS]
    found = merge_findings_by_case(cases, run_ranks(compare_cases_with_one_process, 4, cases, timeout=280))
    assert not [problem for one in found if (problem := one.describe_problem(1e-10))]
