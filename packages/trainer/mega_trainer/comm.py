"""Collectives on named groups: thin calls around torch.distributed that do nothing in a group of one.

A `Group` is handed to whoever communicates; nothing here is global but which one was asked last (`latest`), for a watch to
tell. It can count what passes through it (`log`), so that a test may hold the traffic of a step against theory, and it can
sum in rank order (`ordered`), for tests that compare bits: gloo's own sums are not in rank order from four ranks on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_common.errors import MegaError

Reduction = Literal["sum", "max", "min"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Block until it has finished."""


class Done:
    """A collective that has finished."""

    def wait(self) -> None:
        """At once."""


@dataclass
class CommLog:
    """What passed through the groups that share it: (group, operation) -> [calls, bytes sent or received by a rank].

    Bytes are those of the tensor on one rank: the input of a reduction, the output of a gather.
    """

    counts: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, group: str, operation: str, tensor: Tensor) -> None:
        """Count one call."""
        entry = self.counts.setdefault((group, operation), [0, 0])
        entry[0] += 1
        entry[1] += tensor.numel() * tensor.element_size()


@dataclass(eq=False)
class Group:
    """The ranks along one axis of the layout, as seen by one of them.

    Attributes:
        name: the axis: tp, cp, dp, pp, ...
        ranks: global ranks, in group order.
        rank: this process's place in `ranks`.
        handle: the torch.distributed group; None in a group of one, and where nobody is there: in such a group of several,
            as a plan makes it, calls make what they return and move nothing.
        ordered: sum in rank order, reproducibly and slowly.
        log: where calls are counted, if anywhere.
        latest: the group of which this process last asked something, or for which it last began to wait.
    """

    latest: ClassVar[Group | None] = None

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    handle: dist.ProcessGroup | None = None
    ordered: bool = False
    log: CommLog | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def planned(self) -> bool:
        """Whether there are several ranks, and nobody there."""
        return self.handle is None and self.size > 1

    def __str__(self) -> str:
        return f"{self.name} of ranks {', '.join(map(str, self.ranks[:8]))}" + (", ..." if self.size > 8 else "")

    def count(self, operation: str, tensor: Tensor) -> None:
        """Note that a call of `operation` on `tensor` begins."""
        Group.latest = self
        if self.log is not None:
            self.log.add(self.name, operation, tensor)


@dataclass(frozen=True)
class Pending:
    """A call among a group's ranks that is under way. Whoever waits for it is seen to wait for them (`Group.latest`)."""

    work: Work
    group: Group

    def wait(self) -> None:
        """Block until it has finished."""
        Group.latest = self.group
        self.work.wait()


def _started(work: Any, group: Group) -> Work | None:
    """What there is to wait for, if anything."""
    return None if work is None else Pending(work, group)


def all_reduce(tensor: Tensor, group: Group, op: Reduction = "sum", *, async_op: bool = False) -> Work | None:
    """Reduce `tensor` over the group, in place. Returns the work to wait for when `async_op`."""
    if group.size == 1:
        return None
    group.count("all_reduce", tensor)
    if group.planned:
        return None
    if group.ordered and op == "sum":
        parts = [torch.empty_like(tensor) for _ in group.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=group.handle)
        tensor.copy_(_sum_in_order(parts))
        return None
    return _started(dist.all_reduce(tensor, _OPS[op], group=group.handle, async_op=async_op), group)


@contextlib.contextmanager
def raised_alike(group: Group) -> Iterator[None]:
    """What one rank raises in the block, all raise, the first rank's error if there are several: none waits in vain.

    Raises:
        MegaError: of any rank.
    """
    met: list[MegaError | None] = [None] * group.size
    try:
        yield
    except MegaError as error:
        met[group.rank] = error
    if group.size > 1:
        dist.all_gather_object(met, met[group.rank], group=group.handle)
    first = next((error for error in met if error is not None), None)
    if first is not None:
        raise first


def all_gather(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Concatenate every rank's tensor along `dim`: [.., n, ..] -> [.., n * size, ..]."""
    whole, work = start_all_gather(tensor, group, dim)
    if work is not None:
        work.wait()
    return whole


def start_all_gather(tensor: Tensor, group: Group, dim: int = 0) -> tuple[Tensor, Work | None]:
    """Like `all_gather`, but returns at once: the whole is there when the work is done."""
    if group.size == 1:
        return tensor, None
    moved = tensor.movedim(dim, 0).contiguous()
    out = moved.new_empty((moved.shape[0] * group.size, *moved.shape[1:]))
    work = all_gather_into(out, moved, group, async_op=True)
    return out.movedim(0, dim), work


def all_gather_into(out: Tensor, tensor: Tensor, group: Group, *, async_op: bool = False) -> Work | None:
    """Gather contiguous `tensor` [n, ..] of every rank into contiguous `out` [n * size, ..]."""
    if group.size == 1:
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        return None
    group.count("all_gather", out)
    if group.planned:
        return None
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return _started(gather(out, tensor, group=group.handle, async_op=async_op), group)


def reduce_scatter(tensor: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Sum over the group and keep this rank's part along `dim`: [.., n * size, ..] -> [.., n, ..]."""
    part, work = start_reduce_scatter(tensor, group, dim)
    if work is not None:
        work.wait()
    return part


def start_reduce_scatter(tensor: Tensor, group: Group, dim: int = 0) -> tuple[Tensor, Work | None]:
    """Like `reduce_scatter`, but returns at once: the part is there when the work is done."""
    if group.size == 1:
        return tensor, None
    moved = tensor.movedim(dim, 0).contiguous()
    out = moved.new_empty((moved.shape[0] // group.size, *moved.shape[1:]))
    work = reduce_scatter_into(out, moved, group, async_op=True)
    return out.movedim(0, dim), work


def reduce_scatter_into(out: Tensor, tensor: Tensor, group: Group, *, async_op: bool = False) -> Work | None:
    """Sum contiguous `tensor` [n * size, ..] over the group; this rank's part goes to contiguous `out` [n, ..]."""
    if group.size == 1:
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        return None
    group.count("reduce_scatter", tensor)
    if group.planned:
        return None
    if group.ordered:
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=group.handle)
        out.copy_(_sum_in_order(list(received.chunk(group.size))))
        return None
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return _started(scatter(out, tensor, group=group.handle, async_op=async_op), group)


def all_to_all(tensor: Tensor, group: Group, out_splits: Sequence[int], in_splits: Sequence[int]) -> Tensor:
    """Send `in_splits[r]` rows of `tensor` to each rank r and receive `out_splits[r]` rows from it.

    The one collective here with a gradient: it goes back the way the rows came.
    """
    if group.size == 1:
        return tensor
    out: Tensor = _AllToAll.apply(tensor, group, list(out_splits), list(in_splits))  # type: ignore[no-untyped-call]
    return out


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, out_splits: list[int], in_splits: list[int]) -> Tensor:
        ctx.group, ctx.splits = group, (in_splits, out_splits)
        out = tensor.new_empty((sum(out_splits), *tensor.shape[1:]))
        all_to_all_into(out, tensor.contiguous(), group, out_splits, in_splits)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(gradient, ctx.group, *ctx.splits), None, None, None


def all_to_all_into(
    out: Tensor,
    tensor: Tensor,
    group: Group,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    *,
    async_op: bool = False,
) -> Work | None:
    """As `all_to_all`, from contiguous `tensor` into contiguous `out`, without a gradient; in a group of several."""
    group.count("all_to_all", tensor)
    if group.planned:
        return Done()
    work = dist.all_to_all_single(out, tensor, list(out_splits), list(in_splits), group=group.handle, async_op=async_op)
    return _started(work, group)


@dataclass(frozen=True)
class Passing:
    """A tensor on its way around a ring: `sent` to the next rank, what the previous one sent to `arriving`."""

    sent: Tensor
    arriving: Tensor
    works: Sequence[Work]

    def wait(self) -> Tensor:
        """Block until both have arrived; returns the previous rank's tensor."""
        for work in self.works:
            work.wait()
        return self.arriving


def start_pass(tensor: Tensor, group: Group) -> Passing:
    """Begin to pass contiguous `tensor` to the next rank of the group and to receive the previous one's, as large."""
    arriving = torch.empty_like(tensor)
    group.count("pass", tensor)
    if group.planned:
        return Passing(tensor, arriving, [])
    after, before = (group.ranks[(group.rank + step) % group.size] for step in (1, -1))
    send = dist.P2POp(dist.isend, tensor, after, group.handle)
    receive = dist.P2POp(dist.irecv, arriving, before, group.handle)
    return Passing(tensor, arriving, [Pending(work, group) for work in dist.batch_isend_irecv([send, receive])])


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
