"""Expert dispatch with row counts on the device only: torch's all-to-all over NVSHMEM.

As with `AllToAllDispatcher`, one row is sent per token and target rank, but the row counts stay on the device: the host
never waits, and no unused row is sent. Tables hold a multiple of an even load, shared by the rows of all ranks. Ranks
exchange their row counts first, so that rows that do not fit are dropped, and counted, before they are sent.

In `torch.ops.symm_mem.all_to_all_vdev` each rank reads its rows from the tables of the others, in symmetric memory. So rows
are written directly to that memory, and two tables alternate: once an exchange has passed its barrier, the previous
exchange has finished on every rank. On a CPU gloo sends the rows between the same tables.

This module has not run on a GPU yet.

Legend: R ranks of the group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from mega_common.errors import ConfigError
from mega_trainer.distributed.comm import CollectiveWork, CommGroup, PendingCollective, all_gather
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.parallel.async_all_to_all import AsyncAllToAll, start_row_all_to_all
from mega_trainer.parallel.expert_parallel import (
    SortedExpertRows,
    TokenDispatch,
    expert_ranks_of_tokens,
    local_expert_ids,
    pack_routing,
    sort_rows_by_expert,
    unpack_routing,
)
from mega_trainer.parallel.token_rows import ExpertRowAssignment, gather_token_rows, sum_token_rows

# The kernel splits the bytes from a rank evenly among thread blocks, up to 64; it uses all 64 for tables of at least
# `SMALLEST` bytes.
ALIGNMENT, SMALLEST = 64, 4 << 20


@dataclass(frozen=True)
class NvshmemDispatcher:
    """Expert-parallel dispatcher for all layers of a model over NVSHMEM, with row counts on the device only.
    It is an `ExpertDispatcher`. All ranks must have the same number of tokens.

    Attributes:
        num_experts: E.
        group: the ep x expert_tp ranks that hold all experts.
        parts: expert_tp, the ranks that share an expert.
        bound: capacity for received tokens, and rows of this rank's experts, as a multiple of an even load.
        leaves: calls the fusible functions that write rows and sums to symmetric memory.
    """

    num_experts: int
    group: CommGroup
    parts: int
    bound: float
    leaves: FusibleFunctionCompiler = field(default_factory=FusibleFunctionCompiler)
    _wires: dict[int, SymmetricMemoryAllToAll] = field(default_factory=dict, compare=False)

    def dispatch_tokens(self, x: Tensor, chosen: Tensor, weights: Tensor) -> TokenDispatch:
        """Start to send tokens x to the ranks of their `chosen` experts by NVSHMEM; drop choices over the bound."""
        (tokens, choices), size = chosen.shape, self.group.size
        own, targets = self.num_experts * self.parts // size, min(choices, size // self.parts) * self.parts  # per token
        leaving, capacity = tokens * targets, min(size * tokens, math.ceil(self.bound * tokens * targets))
        wire = self._wires.setdefault(
            tokens, SymmetricMemoryAllToAll(self.group, max(leaving, capacity) + 1, self.leaves)
        )
        ranks = expert_ranks_of_tokens(chosen, own, self.parts)
        sent, received = self._fitting_splits(ranks, capacity)
        slots = ExpertRowAssignment.assign_rows(ranks, size, leaving, sent)
        wait_for_routing = start_row_all_to_all(
            pack_routing(chosen, weights, slots), AsyncAllToAll(wire, sent, received, capacity + 1)
        )
        wait_for_tokens = start_row_all_to_all(
            gather_token_rows(x, replace(slots, pick_rows=wire.scatter_token_rows)),
            AsyncAllToAll(wire, sent, received, capacity + 1),
        )

        def wait_for_rows() -> SortedExpertRows:
            recv_weights, recv_chosen = unpack_routing(wait_for_routing(), choices, received.sum())
            local = local_expert_ids(recv_chosen, self.group.rank // self.parts, own)
            rows = math.ceil(self.bound * (tokens * choices * self.parts))
            return sort_rows_by_expert(wait_for_tokens(), local, recv_weights, own, rows, wire.sum_choice_rows)

        def combine_outputs(y: Tensor) -> Tensor:
            returned = start_row_all_to_all(y, AsyncAllToAll(wire, received, sent, leaving + 1))()
            return sum_token_rows(returned, replace(slots, pick_rows=wire.scatter_token_rows))

        return TokenDispatch(wait_for_rows, combine_outputs, slots.dropped)

    def _fitting_splits(self, ranks: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Return the row counts to and from each rank, int64 [R]; rows of lower ranks take precedence."""
        size, own = self.group.size, ranks.flatten() + 1
        counts = own.new_zeros(size + 1).scatter_add_(0, own, torch.ones_like(own))[1:]
        table = all_gather(counts, self.group).view(size, size)  # from each rank to each
        table = torch.minimum(table, (capacity - (table.cumsum(0) - table)).clamp(min=0))
        return table[self.group.rank].contiguous(), table[:, self.group.rank].contiguous()


@dataclass(frozen=True)
class SymmetricMemoryTables:
    """Tensors of rows to send and of received rows in symmetric memory, which all ranks of a group can access.

    Attributes:
        leaving, arriving: [length, width].
        sent: int64 [R], row counts to each rank.
        received: int64 [2, R], row counts from each rank, and their offsets.
    """

    leaving: Tensor
    arriving: Tensor
    sent: Tensor
    received: Tensor


@dataclass(eq=False)
class SymmetricMemoryAllToAll:
    """Transport of an all-to-all over symmetric memory, an `AllToAllFunction`.
    Row counts are tensors, int64 [ranks], and rows are built in the memory from which they are sent.

    Attributes:
        group: the ranks of the exchange.
        length: rows of a table.
        leaves: calls the fusible functions that write rows and sums.
    """

    group: CommGroup
    length: int
    leaves: FusibleFunctionCompiler
    _tables: dict[tuple[int, torch.dtype], list[SymmetricMemoryTables]] = field(default_factory=dict)
    _filled: dict[int, SymmetricMemoryTables] = field(
        default_factory=dict
    )  # tables with rows to be sent, by storage id
    _stream: torch.cuda.Stream | None = None

    def scatter_token_rows(self, x: Tensor, slots: ExpertRowAssignment) -> Tensor:
        """Copy tokens to their rows in the symmetric memory they are sent from; rows without a token are arbitrary."""
        return self.leaves(scatter_token_rows_kernel, x, slots.row, self._next_leaving(slots.row_count + 1, x))

    def sum_choice_rows(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Sum the rows with each token's `numbers` [N, K] into the symmetric memory from which the sums are sent."""
        return self.leaves(sum_token_rows_kernel, rows, numbers, self._next_leaving(len(numbers), rows))

    def __call__(self, rows: Tensor, sent: Tensor, received: Tensor, length: int) -> tuple[Tensor, CollectiveWork]:
        """Start the all-to-all of `rows`; see `AllToAllFunction`.
        It must have ended before the second next one of equal width and dtype starts.
        """
        tables = self._filled.pop(_storage_id(rows), None)
        if tables is None:  # rows in other memory
            per_row = ALIGNMENT // rows.element_size()
            tables = self._next_tables(rows, -(-rows.shape[1] // per_row) * per_row)
            tables.leaving[: len(rows), : rows.shape[1]] = rows
        tables.sent.copy_(sent)
        return tables.arriving[:length, : rows.shape[1]], self._start_exchange(tables, received)

    def _next_leaving(self, count: int, like: Tensor) -> Tensor:
        tables = self._next_tables(like, like.shape[1])
        self._filled[_storage_id(tables.leaving)] = tables
        return tables.leaving[:count]

    def _next_tables(self, like: Tensor, width: int) -> SymmetricMemoryTables:
        """Return the tables that were not used last."""
        pair = self._tables.setdefault((width, like.dtype), [])
        if not pair:
            pair += [allocate_symmetric_memory(self.group, self.length, width, like) for _ in range(2)]
        pair.reverse()
        return pair[0]

    def _start_exchange(self, tables: SymmetricMemoryTables, received: Tensor) -> CollectiveWork:
        self.group.record_call("all_to_all", tables.leaving)
        if not tables.leaving.is_cuda:
            return all_to_all_by_gloo(tables, self.group, received)
        stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch_nvshmem_all_to_all(tables, self.group)
        return _LaunchedWork(stream.record_event())


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # not the data pointer, which fake tensors do not have


def launch_nvshmem_all_to_all(tables: SymmetricMemoryTables, group: CommGroup) -> None:
    """Launch the NVSHMEM all-to-all kernel that `tables` describe, on a GPU; it also writes `tables.received`."""
    assert group.process_group is not None
    torch.ops.symm_mem.all_to_all_vdev(
        tables.leaving, tables.arriving, tables.sent, tables.received, group.process_group.group_name
    )


def all_to_all_by_gloo(tables: SymmetricMemoryTables, group: CommGroup, received: Tensor) -> CollectiveWork:
    """Start to exchange the tables' rows on a CPU by gloo, as the NVSHMEM kernel does on a GPU; return the handle.
    `received` are the row counts from each rank.
    """
    to_ranks, from_ranks = tables.sent.tolist(), received.tolist()
    own, out = tables.leaving[: sum(to_ranks)], tables.arriving[: sum(from_ranks)]
    work = dist.all_to_all_single(out, own, from_ranks, to_ranks, group=group.process_group, async_op=True)
    return PendingCollective(work, group)


@dataclass(frozen=True)
class _LaunchedWork:
    event: torch.cuda.Event

    def wait(self) -> None:
        """Make the current stream wait for the exchange; the host continues."""
        torch.cuda.current_stream().wait_event(self.event)


def allocate_symmetric_memory(group: CommGroup, length: int, width: int, like: Tensor) -> SymmetricMemoryTables:
    """Allocate tensors to send and receive rows: symmetric memory on GPUs, ordinary on a CPU; all ranks must call.
    They have at least `length` rows of this width, and `like`'s dtype and device.

    Raises:
        ConfigError: when NVSHMEM is not available.
    """
    length = max(length, -(-SMALLEST // (width * like.element_size())))
    shapes = [((length, width), like.dtype)] * 2 + [((group.size,), torch.int64), ((2, group.size), torch.int64)]
    if not like.is_cuda:
        return SymmetricMemoryTables(*(torch.empty(shape, dtype=dtype, device=like.device) for shape, dtype in shapes))
    if not symmetric_memory.is_nvshmem_available():
        raise ConfigError(
            "parallel.dispatch = nvshmem requires NVSHMEM, which torch does not find",
            hint="install nvidia-nvshmem for this CUDA, or set parallel.dispatch=alltoall",
        )
    assert group.process_group is not None
    symmetric_memory.set_backend("NVSHMEM")
    tables = [symmetric_memory.empty(*shape, dtype=dtype, device=like.device) for shape, dtype in shapes]
    for table in tables:
        symmetric_memory.rendezvous(table, group.process_group)
    return SymmetricMemoryTables(*tables)


def scatter_token_rows_kernel(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Copy each token of x [N, D] to its rows of `out` [M + 1, D], by row numbers int64 [N, K]; a token is read once.

    All choices without a row are written to the last row, which is unused, in any order.
    """
    return out.index_put_((rows,), x.unsqueeze(1).expand(-1, rows.shape[1], -1))


def sum_token_rows_kernel(rows: Tensor, numbers: Tensor, out: Tensor) -> Tensor:
    """Sum the rows of an expert-sorted buffer that belong to each token into `out` [N, D].
    The rows are [M + 1, D], and `numbers` int64 [N, K] are the numbers of each token's rows; the last row counts as
    zero.
    """
    total = upcast_to_fp32(out.new_zeros(()))
    for number in numbers.unbind(1):
        total = total + torch.where((number == len(rows) - 1).unsqueeze(-1), 0.0, upcast_to_fp32(rows[number]))
    return out.copy_(total)
