"""Expert dispatch with row counts on the device only: torch's all-to-all over NVSHMEM.

As `AllToAll`, one row for each token and rank, but their numbers stay on the device: the host waits in no layer, and yet no
row is sent that is nobody's. Tables have room for a multiple of an even load, which the rows of all ranks share; ranks tell
each other their numbers first, so that what does not fit is left out, and told as lost, where it would set out.

In `torch.ops.symm_mem.all_to_all_vdev` each rank gets its rows from the tables of the others, in memory that all can read.
So rows are made at their place there, and tables take turns: when an exchange has passed its barrier, that before it
is over on every rank. On a CPU gloo sends the rows between the same tables.

Nothing here has run on a GPU yet. Legend: R ranks of the group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from mega_common.errors import ConfigError
from mega_trainer.distributed.comm import CollectiveWork, CommGroup, PendingWork, all_gather
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.leaf_compiler import LeafCompiler
from mega_trainer.parallel.async_all_to_all import AsyncAllToAll, start_exchange
from mega_trainer.parallel.expert_parallel import (
    ExpertRows,
    TokenDispatch,
    local_expert_ids,
    pack_routing,
    sort_rows_by_expert,
    target_ranks,
    unpack_routing,
)
from mega_trainer.parallel.token_rows import RowAssignment, gather_token_rows, sum_token_rows

# The kernel wants what comes from a rank to be the same number of bytes for each of up to 64 blocks, which are as many
# from a table of so many bytes on.
ALIGNMENT, SMALLEST = 64, 4 << 20


@dataclass(frozen=True)
class NvshmemDispatcher:
    """`ExpertDispatcher` over NVSHMEM for all layers of a model. All ranks must bring equally many tokens.

    Attributes:
        num_experts: E.
        group: the ep x expert_tp ranks that hold all experts.
        parts: expert_tp, the ranks that share an expert.
        bound: room for tokens that come, and rows of this rank's experts, as a multiple of an even load.
        leaves: computes sums at their places.
    """

    num_experts: int
    group: CommGroup
    parts: int
    bound: float
    leaves: LeafCompiler = field(default_factory=LeafCompiler)
    _wires: dict[int, SymmetricWire] = field(default_factory=dict, compare=False)

    def dispatch_tokens(self, x: Tensor, chosen: Tensor, weights: Tensor) -> TokenDispatch:
        """See `ExpertDispatcher.dispatch_tokens`."""
        (tokens, choices), size = chosen.shape, self.group.size
        own, most = self.num_experts * self.parts // size, min(choices, size // self.parts) * self.parts  # of a token
        leaving, room = tokens * most, min(size * tokens, math.ceil(self.bound * tokens * most))
        wire = self._wires.setdefault(tokens, SymmetricWire(self.group, max(leaving, room) + 1, self.leaves))
        ranks = target_ranks(chosen, own, self.parts)
        sent, received = self._fitting_splits(ranks, room)
        slots = RowAssignment.assign_rows(ranks, size, leaving, sent)
        away = start_exchange(pack_routing(chosen, weights, slots), AsyncAllToAll(wire, sent, received, room + 1))
        there = start_exchange(
            gather_token_rows(x, replace(slots, pick_rows=wire.spread_token_rows)),
            AsyncAllToAll(wire, sent, received, room + 1),
        )

        def wait_for_rows() -> ExpertRows:
            came, theirs = unpack_routing(away(), choices, received.sum())
            theirs, rows = local_expert_ids(theirs, self.group.rank // self.parts, own), tokens * choices * self.parts
            return sort_rows_by_expert(there(), theirs, came, own, math.ceil(self.bound * rows), wire.sum_choice_rows)

        def combine_outputs(y: Tensor) -> Tensor:
            came = start_exchange(y, AsyncAllToAll(wire, received, sent, leaving + 1))()
            return sum_token_rows(came, replace(slots, pick_rows=wire.spread_token_rows))

        return TokenDispatch(wait_for_rows, combine_outputs, slots.dropped)

    def _fitting_splits(self, ranks: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Return the rows to and from each rank, int64 [R]; of the rows for one rank, the first ranks' take precedence."""
        size, own = self.group.size, ranks.flatten() + 1
        counts = own.new_zeros(size + 1).scatter_add_(0, own, torch.ones_like(own))[1:]
        table = all_gather(counts, self.group).view(size, size)  # from each rank to each
        table = torch.minimum(table, (room - (table.cumsum(0) - table)).clamp(min=0))
        return table[self.group.rank].contiguous(), table[:, self.group.rank].contiguous()


@dataclass(frozen=True)
class SymmetricTables:
    """Row tables in memory that all ranks of a group can read.

    Attributes:
        leaving, arriving: [length, width].
        sent: int64 [R], rows to each rank.
        received: int64 [2, R], rows from each, and where the first of them is.
    """

    leaving: Tensor
    arriving: Tensor
    sent: Tensor
    received: Tensor


@dataclass(eq=False)
class SymmetricWire:
    """`Wire` whose row counts are tensors, int64 [R], and which builds rows in the memory they are sent from.

    Attributes:
        group: who takes part.
        length: rows of a table.
        leaves: computes sums.
    """

    group: CommGroup
    length: int
    leaves: LeafCompiler
    _tables: dict[tuple[int, torch.dtype], list[SymmetricTables]] = field(default_factory=dict)
    _made: dict[int, SymmetricTables] = field(
        default_factory=dict
    )  # whose rows are made and not sent yet, by their memory
    _stream: torch.cuda.Stream | None = None

    def spread_token_rows(self, x: Tensor, slots: RowAssignment) -> Tensor:
        """Copy tokens to their rows, as `pick_token_rows`; a row without a token holds arbitrary values."""
        return self.leaves(spread_rows_kernel, x, slots.row, self._next_leaving(slots.row_count + 1, x))

    def sum_choice_rows(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """See `sum_choice_rows`."""
        return self.leaves(sum_rows_kernel, rows, numbers, self._next_leaving(len(numbers), rows))

    def __call__(self, rows: Tensor, sent: Tensor, received: Tensor, length: int) -> tuple[Tensor, CollectiveWork]:
        """See `Wire`. Between the first exchange of a shape and the third, the second must have ended."""
        tables = self._made.pop(_storage_id(rows), None)
        if tables is None:  # made elsewhere
            per_row = ALIGNMENT // rows.element_size()
            tables = self._next_tables(rows, -(-rows.shape[1] // per_row) * per_row)
            tables.leaving[: len(rows), : rows.shape[1]] = rows
        tables.sent.copy_(sent)
        return tables.arriving[:length, : rows.shape[1]], self._start_exchange(tables, received)

    def _next_leaving(self, count: int, like: Tensor) -> Tensor:
        tables = self._next_tables(like, like.shape[1])
        self._made[_storage_id(tables.leaving)] = tables
        return tables.leaving[:count]

    def _next_tables(self, like: Tensor, width: int) -> SymmetricTables:
        """Return the tables that have not been used for longest."""
        turns = self._tables.setdefault((width, like.dtype), [])
        if not turns:
            turns += [allocate_tables(self.group, self.length, width, like) for _ in range(2)]
        turns.reverse()
        return turns[0]

    def _start_exchange(self, tables: SymmetricTables, received: Tensor) -> CollectiveWork:
        self.group.record_call("all_to_all", tables.leaving)
        if not tables.leaving.is_cuda:
            return exchange_by_gloo(tables, self.group, received)
        stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch_all_to_all(tables, self.group)
        return _LaunchedWork(stream.record_event())


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # as its address, which a fake tensor has not


def launch_all_to_all(tables: SymmetricTables, group: CommGroup) -> None:
    """Launch the exchange on a GPU; it also writes `received` of the tables."""
    assert group.process_group is not None
    torch.ops.symm_mem.all_to_all_vdev(
        tables.leaving, tables.arriving, tables.sent, tables.received, group.process_group.group_name
    )


def exchange_by_gloo(tables: SymmetricTables, group: CommGroup, received: Tensor) -> CollectiveWork:
    """Exchange the tables on a CPU; the received row counts are already known."""
    there, here = tables.sent.tolist(), received.tolist()
    own, out = tables.leaving[: sum(there)], tables.arriving[: sum(here)]
    return PendingWork(dist.all_to_all_single(out, own, here, there, group=group.process_group, async_op=True), group)


@dataclass(frozen=True)
class _LaunchedWork:
    event: torch.cuda.Event

    def wait(self) -> None:
        """Make the current stream wait for the exchange; the host continues."""
        torch.cuda.current_stream().wait_event(self.event)


def allocate_tables(group: CommGroup, length: int, width: int, like: Tensor) -> SymmetricTables:
    """Allocate tables for rows of this width, in the memory of `like`'s device. A collective call.

    Raises:
        ConfigError: where NVSHMEM is missing.
    """
    length = max(length, -(-SMALLEST // (width * like.element_size())))
    shapes = [((length, width), like.dtype)] * 2 + [((group.size,), torch.int64), ((2, group.size), torch.int64)]
    if not like.is_cuda:
        return SymmetricTables(*(torch.empty(shape, dtype=dtype, device=like.device) for shape, dtype in shapes))
    if not symmetric_memory.is_nvshmem_available():
        raise ConfigError(
            "parallel.dispatch = nvshmem: torch finds no NVSHMEM here",
            hint="install nvidia-nvshmem for this CUDA, or set parallel.dispatch=alltoall",
        )
    assert group.process_group is not None
    symmetric_memory.set_backend("NVSHMEM")
    tables = [symmetric_memory.empty(*shape, dtype=dtype, device=like.device) for shape, dtype in shapes]
    for table in tables:
        symmetric_memory.rendezvous(table, group.process_group)
    return SymmetricTables(*tables)


def spread_rows_kernel(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Copy each token of x [N, D] to its rows of `out` [M + 1, D], by row numbers int64 [N, K]; a token is read once.

    The last row is nobody's, and all choices without one are written there, in any order.
    """
    return out.index_put_((rows,), x.unsqueeze(1).expand(-1, rows.shape[1], -1))


def sum_rows_kernel(rows: Tensor, numbers: Tensor, out: Tensor) -> Tensor:
    """Sum rows as `sum_choice_rows`, into `out` [N, D]."""
    total = upcast_to_fp32(out.new_zeros(()))
    for number in numbers.unbind(1):
        total = total + torch.where((number == len(rows) - 1).unsqueeze(-1), 0.0, upcast_to_fp32(rows[number]))
    return out.copy_(total)
