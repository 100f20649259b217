"""Dispatch by NVSHMEM: what it computes, on gloo; and torch's operator, called as its schema wants, over a stand-in of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from trainer.parallel import test_expert_parallel
from trainer.parallel.test_expert_parallel import LAYOUTS, Found, dispatched

from mega_common.errors import ConfigError
from mega_trainer.distributed.comm import CollectiveWork, CommGroup
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.parallel import nvshmem_dispatch
from mega_trainer.parallel.nvshmem_dispatch import (
    ALIGNMENT,
    NvshmemDispatcher,
    SymmetricMemoryAllToAll,
    SymmetricMemoryTables,
    allocate_symmetric_memory,
    scatter_token_rows_kernel,
    sum_token_rows_kernel,
)
from mega_trainer.parallel.token_rows import ExpertRowAssignment, gather_token_rows_no_grad, sum_choice_rows


def poisoned(*args: Any) -> SymmetricMemoryTables:
    """Tables in which everything is not a number until it is written."""
    tables = allocate_symmetric_memory(*args)
    for table in (tables.leaving, tables.arriving):
        table.fill_(torch.nan)
    return tables


def by_nvshmem(ep: int, parts: int, empty: bool, bound: float) -> Found:
    with (
        mock.patch.object(nvshmem_dispatch, "allocate_symmetric_memory", poisoned),
        mock.patch.object(test_expert_parallel, "D", 8),
    ):
        return dispatched(ep, parts, empty, bound, NvshmemDispatcher)


def test_tokens_meet_their_experts() -> None:
    for ep, parts in LAYOUTS:
        for empty in (False, True):
            results = run_ranks(by_nvshmem, 4, ep, parts, empty, float(ep))
            assert all(max(found.errors) < 1e-12 and found.lost == 0 for found in results)


def test_room_is_shared_by_what_comes_from_all_ranks() -> None:
    """Two ranks get nothing: with room to each for an even load alone the others lose some of what is sent to them."""
    results = run_ranks(by_nvshmem, 4, 4, 1, True, 1.0)
    assert [found.worked for found in results[2:]] == [0, 0]
    assert sum(found.lost for found in results) > 0
    assert max(found.rows for found in results) == 4 * 3 + 1
    enough = run_ranks(by_nvshmem, 4, 4, 1, True, 2.0)
    assert all(found.lost == 0 for found in enough)


def pulled(leaving: Tensor, arriving: Tensor, sent: Tensor, received: Tensor, name: str) -> None:
    """What the operator is said to do: every rank's splits are exchanged, then each takes its rows from the tables of others."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    assert name == dist.group.WORLD.group_name  # type: ignore[union-attr]
    assert leaving.is_contiguous()
    assert leaving.stride(0) * leaving.element_size() % ALIGNMENT == 0
    splits = [torch.empty_like(sent) for _ in range(ranks)]
    tables = [torch.empty_like(leaving) for _ in range(ranks)]
    dist.all_gather(splits, sent)
    dist.all_gather(tables, leaving)
    received[0] = torch.stack(splits)[:, rank]
    received[1] = received[0].cumsum(0) - received[0]
    for source, (split, table) in enumerate(zip(splits, tables, strict=True)):
        first, count, at = int(split[:rank].sum()), int(received[0, source]), int(received[1, source])
        arriving[at : at + count] = table[first : first + count]


class Done:
    def wait(self) -> None: ...


def launched(tables: SymmetricMemoryTables, group: CommGroup, received: Tensor) -> CollectiveWork:
    nvshmem_dispatch.launch_nvshmem_all_to_all(tables, group)
    assert torch.equal(tables.received[0], received)  # the numbers that the ranks told each other
    return Done()


def by_operator(*args: Any) -> Found:
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("all_to_all_vdev", pulled, "CPU")
    with mock.patch.object(nvshmem_dispatch, "all_to_all_by_gloo", launched):
        return by_nvshmem(*args)


def test_torchs_operator_is_given_what_it_wants() -> None:
    for bound in (1.0, 4.0):
        results = run_ranks(by_operator, 4, 4, 1, False, bound)
        assert results == run_ranks(by_nvshmem, 4, 4, 1, False, bound)


def test_sums_at_their_place() -> None:
    rows = torch.randn(6, 4)
    rows[-1] = torch.nan
    numbers = torch.tensor([[0, 3], [5, 2], [5, 5]])
    out = torch.full((3, 4), torch.nan)
    assert sum_token_rows_kernel(rows, numbers, out) is out
    torch.testing.assert_close(out, sum_choice_rows(rows, numbers))


def test_rows_at_their_place() -> None:
    slots = ExpertRowAssignment.assign_rows(torch.tensor([[3, 0], [-1, 3], [0, -1]]), 4, 6)
    x, out = torch.randn(3, 4), torch.full((7, 4), torch.nan)
    assert scatter_token_rows_kernel(x, slots.row, out) is out
    assert torch.equal(out[:4], gather_token_rows_no_grad(x, slots)[:4])
    assert out[4:6].isnan().all()  # nobody's


def test_tables_take_turns() -> None:
    """What has been sent may still be on its way when the next rows are made."""
    wire = SymmetricMemoryAllToAll(CommGroup("ep", (0, 1)), 8, FusibleFunctionCompiler())
    x = torch.randn(8, 16, dtype=torch.float64)
    one_each = ExpertRowAssignment.assign_rows(torch.arange(8).unsqueeze(1), 8, 7)
    first, second, third = (wire.scatter_token_rows(x, one_each) for _ in range(3))
    assert first.data_ptr() == third.data_ptr() != second.data_ptr()
    assert torch.equal(second[:7], x[:7])


def test_where_it_is_missing() -> None:
    like = mock.Mock(is_cuda=True, dtype=torch.bfloat16, element_size=lambda: 2)
    with (
        mock.patch.object(symmetric_memory, "is_nvshmem_available", return_value=False),
        pytest.raises(ConfigError, match=r"parallel\.dispatch = nvshmem"),
    ):
        allocate_symmetric_memory(CommGroup("ep", (0, 1)), 8, 32, like)
