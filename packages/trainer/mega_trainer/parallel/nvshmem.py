"""Experts reached without the host knowing how many rows travel: torch's all-to-all over NVSHMEM.

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
from mega_trainer.comm import Group, Pending, Work, all_gather
from mega_trainer.kernels.fused import wide
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.parallel.exchange import Exchange, start
from mega_trainer.parallel.expert import Delivery, Sorted, by_expert, own_of, ranks_of, read_ticket, ticket_of
from mega_trainer.parallel.slots import Slots, collect, gather

# The kernel wants what comes from a rank to be the same number of bytes for each of up to 64 blocks, which are as many
# from a table of so many bytes on.
ALIGNMENT, SMALLEST = 64, 4 << 20


@dataclass(frozen=True)
class Nvshmem:
    """A `Dispatcher` for all layers of a model. All ranks must bring as many tokens.

    Attributes:
        num_experts: E.
        group: the ep x expert_tp ranks that hold all experts.
        parts: expert_tp, the ranks that share an expert.
        bound: room for tokens that come, and rows of this rank's experts, as a multiple of an even load.
        leaves: computes sums at their places.
    """

    num_experts: int
    group: Group
    parts: int
    bound: float
    leaves: Leaves = field(default_factory=Leaves)
    _wires: dict[int, SymmetricWire] = field(default_factory=dict, compare=False)

    def send(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Delivery:
        """See `Dispatcher`."""
        (tokens, choices), size = chosen.shape, self.group.size
        own, most = self.num_experts * self.parts // size, min(choices, size // self.parts) * self.parts  # of a token
        leaving, room = tokens * most, min(size * tokens, math.ceil(self.bound * tokens * most))
        wire = self._wires.setdefault(tokens, SymmetricWire(self.group, max(leaving, room) + 1, self.leaves))
        ranks = ranks_of(chosen, own, self.parts)
        sent, received = self._fitting(ranks, room)
        slots = Slots.of(ranks, size, leaving, sent)
        away = start(ticket_of(chosen, weights, slots), Exchange(wire, sent, received, room + 1))
        there = start(gather(x, replace(slots, pick=wire.pick)), Exchange(wire, sent, received, room + 1))

        def arrived() -> Sorted:
            came, theirs = read_ticket(away(), choices, received.sum())
            theirs, rows = own_of(theirs, self.group.rank // self.parts, own), tokens * choices * self.parts
            return by_expert(there(), theirs, came, own, math.ceil(self.bound * rows), wire.sum)

        def back(y: Tensor) -> Tensor:
            came = start(y, Exchange(wire, received, sent, leaving + 1))()
            return collect(came, replace(slots, pick=wire.pick))

        return Delivery(arrived, back, slots.lost)

    def _fitting(self, ranks: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Rows to and from each rank, int64 [R]: of those for one rank, the first ranks' go first."""
        size, own = self.group.size, ranks.flatten() + 1
        counts = own.new_zeros(size + 1).scatter_add_(0, own, torch.ones_like(own))[1:]
        table = all_gather(counts, self.group).view(size, size)  # from each rank to each
        table = torch.minimum(table, (room - (table.cumsum(0) - table)).clamp(min=0))
        return table[self.group.rank].contiguous(), table[:, self.group.rank].contiguous()


@dataclass(frozen=True)
class Tables:
    """In memory that all ranks of a group can read.

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
    """A `Wire` whose numbers of rows are tensors, int64 [R], and makers of rows at the place from which they leave.

    Attributes:
        group: who takes part.
        length: rows of a table.
        leaves: computes sums.
    """

    group: Group
    length: int
    leaves: Leaves
    _tables: dict[tuple[int, torch.dtype], list[Tables]] = field(default_factory=dict)
    _made: dict[int, Tables] = field(default_factory=dict)  # whose rows are made and not sent yet, by their memory
    _stream: torch.cuda.Stream | None = None

    def pick(self, x: Tensor, slots: Slots) -> Tensor:
        """As `slots.picked`; a row that is for no token holds anything."""
        return self.leaves(spread_leaf, x, slots.row, self._place(slots.rows + 1, x))

    def sum(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """See `slots.summed`."""
        return self.leaves(summed_leaf, rows, numbers, self._place(len(numbers), rows))

    def __call__(self, rows: Tensor, sent: Tensor, received: Tensor, length: int) -> tuple[Tensor, Work]:
        """See `Wire`. Between the first exchange of a shape and the third, the second must have ended."""
        tables = self._made.pop(_memory(rows), None)
        if tables is None:  # made elsewhere
            per_row = ALIGNMENT // rows.element_size()
            tables = self._turn(rows, -(-rows.shape[1] // per_row) * per_row)
            tables.leaving[: len(rows), : rows.shape[1]] = rows
        tables.sent.copy_(sent)
        return tables.arriving[:length, : rows.shape[1]], self._exchange(tables, received)

    def _place(self, count: int, like: Tensor) -> Tensor:
        tables = self._turn(like, like.shape[1])
        self._made[_memory(tables.leaving)] = tables
        return tables.leaving[:count]

    def _turn(self, like: Tensor, width: int) -> Tables:
        """Those tables that have not been used for longest."""
        turns = self._tables.setdefault((width, like.dtype), [])
        if not turns:
            turns += [make_tables(self.group, self.length, width, like) for _ in range(2)]
        turns.reverse()
        return turns[0]

    def _exchange(self, tables: Tables, received: Tensor) -> Work:
        self.group.count("all_to_all", tables.leaving)
        if not tables.leaving.is_cuda:
            return by_gloo(tables, self.group, received)
        stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch(tables, self.group)
        return _Launched(stream.record_event())


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # as its address, which a fake tensor has not


def launch(tables: Tables, group: Group) -> None:
    """The exchange on a GPU; `received` of the tables is written, too."""
    assert group.handle is not None
    torch.ops.symm_mem.all_to_all_vdev(
        tables.leaving, tables.arriving, tables.sent, tables.received, group.handle.group_name
    )


def by_gloo(tables: Tables, group: Group, received: Tensor) -> Work:
    """The same on a CPU, of which no rank waits for another's numbers: these it has got."""
    there, here = tables.sent.tolist(), received.tolist()
    own, out = tables.leaving[: sum(there)], tables.arriving[: sum(here)]
    return Pending(dist.all_to_all_single(out, own, here, there, group=group.handle, async_op=True), group)


@dataclass(frozen=True)
class _Launched:
    event: torch.cuda.Event

    def wait(self) -> None:
        """What this stream does from now on comes after it; the host goes on."""
        torch.cuda.current_stream().wait_event(self.event)


def make_tables(group: Group, length: int, width: int, like: Tensor) -> Tables:
    """For rows of this width, in the memory of `like`'s device. A collective call.

    Raises:
        ConfigError: where NVSHMEM is missing.
    """
    length = max(length, -(-SMALLEST // (width * like.element_size())))
    shapes = [((length, width), like.dtype)] * 2 + [((group.size,), torch.int64), ((2, group.size), torch.int64)]
    if not like.is_cuda:
        return Tables(*(torch.empty(shape, dtype=dtype, device=like.device) for shape, dtype in shapes))
    if not symmetric_memory.is_nvshmem_available():
        raise ConfigError(
            "parallel.dispatch = nvshmem: torch finds no NVSHMEM here",
            hint="install nvidia-nvshmem for this CUDA, or set parallel.dispatch=alltoall",
        )
    assert group.handle is not None
    symmetric_memory.set_backend("NVSHMEM")
    tables = [symmetric_memory.empty(*shape, dtype=dtype, device=like.device) for shape, dtype in shapes]
    for table in tables:
        symmetric_memory.rendezvous(table, group.handle)
    return Tables(*tables)


def spread_leaf(x: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Each of x [N, D] to its rows of `out` [M + 1, D], by their numbers int64 [N, K]; a token is read once.

    The last row is nobody's, and all choices without one are written there, in any order.
    """
    return out.index_put_((rows,), x.unsqueeze(1).expand(-1, rows.shape[1], -1))


def summed_leaf(rows: Tensor, numbers: Tensor, out: Tensor) -> Tensor:
    """As `slots.summed`, into `out` [N, D]."""
    total = wide(out.new_zeros(()))
    for number in numbers.unbind(1):
        total = total + torch.where((number == len(rows) - 1).unsqueeze(-1), 0.0, wide(rows[number]))
    return out.copy_(total)
