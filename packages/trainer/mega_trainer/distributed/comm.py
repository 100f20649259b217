"""Collectives on named groups: thin calls around torch.distributed that do nothing in a group of one.

A `CommGroup` is passed to the code that communicates; the only global state is the last used group (`latest`), for the hang
watchdog. A group can count its traffic (`log`), for tests that compare it with theory, and reduce in rank order (`ordered`),
for tests that compare bits: gloo does not reduce in rank order with four or more ranks.
"""

from __future__ import annotations

import contextlib
import re
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


class CollectiveWork(Protocol):
    """Handle of an asynchronous collective; call `wait` before the output is used."""

    def wait(self) -> object:
        """Wait until the output may be used: on a GPU the current stream waits, on a CPU the host."""


class CompletedCollective:
    """Handle of a collective that has already finished; `wait` does nothing."""

    def wait(self) -> None:
        """Return at once: the collective has already finished."""


@dataclass
class CommTrafficCounter:
    """Counter of this rank's collective calls and their bytes, by (group name, operation).
    `counts` maps each pair to [calls, bytes]; groups that share the counter are counted together if they share a name.

    Bytes are of the tensor on one rank: the input of a reduction, the output of a gather.
    """

    counts: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def count_call(self, group: str, operation: str, tensor: Tensor) -> None:
        """Count one call of `operation` in `group`, and add the bytes of `tensor`."""
        entry = self.counts.setdefault((group, operation), [0, 0])
        entry[0] += 1
        entry[1] += tensor.numel() * tensor.element_size()


@dataclass(eq=False)
class CommGroup:
    """Ranks along one axis of the parallel layout, with this rank's index among them and the torch process group.
    It is the argument of all collectives in this module.

    Attributes:
        name: the axis: tp, cp, dp, pp, ...
        ranks: global ranks, in group order.
        rank: index of this process in `ranks`.
        process_group: the torch.distributed group; None in a group of one, and in a planned group of several ranks, whose
            calls return tensors without communication.
        ordered: reduce in rank order, reproducibly and slowly.
        log: counter of calls, if any.
        latest: the group that this process last used or began to wait for.
    """

    latest: ClassVar[CommGroup | None] = None

    name: str
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    process_group: dist.ProcessGroup | None = None
    ordered: bool = False
    log: CommTrafficCounter | None = None

    @property
    def size(self) -> int:
        """Number of ranks in this communication group."""
        return len(self.ranks)

    @property
    def has_no_process_group(self) -> bool:
        """True in a planned group: several ranks, no process group, and collectives that communicate nothing."""
        return self.process_group is None and self.size > 1

    def __str__(self) -> str:
        return f"{self.name} of ranks {', '.join(map(str, self.ranks[:8]))}" + (", ..." if self.size > 8 else "")

    def record_call(self, operation: str, tensor: Tensor) -> None:
        """Make this group `CommGroup.latest`, for the hang watchdog, and count the call in the traffic log, if any."""
        CommGroup.latest = self
        if self.log is not None:
            self.log.count_call(self.name, operation, tensor)


@dataclass(frozen=True)
class PendingCollective:
    """Handle of a collective operation in progress on a communication group.
    `wait` first makes the group `CommGroup.latest`, which the hang watchdog reports.
    """

    work: CollectiveWork
    group: CommGroup

    def wait(self) -> None:
        """Wait for the collective, after making its group `CommGroup.latest`, which the hang watchdog reports."""
        CommGroup.latest = self.group
        self.work.wait()


def _pending_work(work: Any, group: CommGroup) -> CollectiveWork | None:
    """Return the handle to wait for, or None."""
    return None if work is None else PendingCollective(work, group)


def all_reduce(
    tensor: Tensor, group: CommGroup, op: Reduction = "sum", *, async_op: bool = False
) -> CollectiveWork | None:
    """All-reduce `tensor` in place, without a gradient; return the work to wait for with `async_op`, None if complete."""
    if group.size == 1:
        return None
    group.record_call("all_reduce", tensor)
    if group.has_no_process_group:
        return None
    if group.ordered and op == "sum":
        parts = [torch.empty_like(tensor) for _ in group.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=group.process_group)
        tensor.copy_(_sum_in_order(parts))
        return None
    return _pending_work(dist.all_reduce(tensor, _OPS[op], group=group.process_group, async_op=async_op), group)


@contextlib.contextmanager
def raise_on_all_ranks(group: CommGroup) -> Iterator[None]:
    """Raise a `MegaError` of any rank's `with` block on all ranks of the group, so that none waits forever.
    If several ranks have an error, all raise the first rank's. All ranks must run the block; an exception of another
    type stays on its rank.
    """
    met: list[MegaError | None] = [None] * group.size
    try:
        yield
    except MegaError as error:
        met[group.rank] = error
    if group.size > 1:
        dist.all_gather_object(met, met[group.rank], group=group.process_group)
    first = next((error for error in met if error is not None), None)
    if first is not None:
        raise first


def all_gather(tensor: Tensor, group: CommGroup, dim: int = 0) -> Tensor:
    """Concatenate every rank's tensor along `dim`: [.., n, ..] -> [.., n * size, ..]; without a gradient."""
    whole, work = start_all_gather(tensor, group, dim)
    if work is not None:
        work.wait()
    return whole


def start_all_gather(tensor: Tensor, group: CommGroup, dim: int = 0) -> tuple[Tensor, CollectiveWork | None]:
    """Start an all-gather along `dim`, without a gradient, and return (output, work) at once.
    The output is complete when the work is done, or at once if the work is None.
    """
    if group.size == 1:
        return tensor, None
    moved = tensor.movedim(dim, 0).contiguous()
    out = moved.new_empty((moved.shape[0] * group.size, *moved.shape[1:]))
    work = all_gather_into(out, moved, group, async_op=True)
    return out.movedim(0, dim), work


def all_gather_into(out: Tensor, tensor: Tensor, group: CommGroup, *, async_op: bool = False) -> CollectiveWork | None:
    """Gather contiguous `tensor` [n, ..] of all ranks into contiguous `out` [n * size, ..]; return the work if `async_op`."""
    if group.size == 1:
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        return None
    group.record_call("all_gather", out)
    if group.has_no_process_group:
        return None
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return _pending_work(gather(out, tensor, group=group.process_group, async_op=async_op), group)


def reduce_scatter(tensor: Tensor, group: CommGroup, dim: int = 0) -> Tensor:
    """Sum a tensor over the group and return this rank's slice along `dim`, without a gradient.
    [.., n * size, ..] -> [.., n, ..].
    """
    part, work = start_reduce_scatter(tensor, group, dim)
    if work is not None:
        work.wait()
    return part


def start_reduce_scatter(tensor: Tensor, group: CommGroup, dim: int = 0) -> tuple[Tensor, CollectiveWork | None]:
    """Start a reduce-scatter along `dim`, without a gradient, and return (slice, work) at once.
    The slice is this rank's slice of the sum; it is complete when the work is done, or at once if the work is None.
    """
    if group.size == 1:
        return tensor, None
    moved = tensor.movedim(dim, 0).contiguous()
    out = moved.new_empty((moved.shape[0] // group.size, *moved.shape[1:]))
    work = reduce_scatter_into(out, moved, group, async_op=True)
    return out.movedim(0, dim), work


def reduce_scatter_into(
    out: Tensor, tensor: Tensor, group: CommGroup, *, async_op: bool = False
) -> CollectiveWork | None:
    """Sum a tensor over the group and write this rank's slice to `out` (reduce-scatter); return the work if `async_op`.
    `tensor` [n * size, ..] and `out` [n, ..] are contiguous. Without a gradient.
    """
    if group.size == 1:
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        return None
    group.record_call("reduce_scatter", tensor)
    if group.has_no_process_group:
        return None
    if group.ordered:
        received = torch.empty_like(tensor)
        dist.all_to_all_single(received, tensor, group=group.process_group)
        out.copy_(_sum_in_order(list(received.chunk(group.size))))
        return None
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return _pending_work(scatter(out, tensor, group=group.process_group, async_op=async_op), group)


def all_to_all(tensor: Tensor, group: CommGroup, out_splits: Sequence[int], in_splits: Sequence[int]) -> Tensor:
    """Send `in_splits[r]` rows to each rank r, and return `out_splits[r]` rows from each (all-to-all, differentiable).
    The one collective here with a gradient, which goes back the way the rows came.
    """
    if group.size == 1:
        return tensor
    out: Tensor = _AllToAll.apply(tensor, group, list(out_splits), list(in_splits))  # type: ignore[no-untyped-call]
    return out


class _AllToAll(Function):
    """Differentiable all-to-all; the gradient takes the reverse all-to-all."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: CommGroup, out_splits: list[int], in_splits: list[int]) -> Tensor:
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
    group: CommGroup,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    *,
    async_op: bool = False,
) -> CollectiveWork | None:
    """Send `in_splits[r]` rows of `tensor` to each rank r, receive `out_splits[r]` into `out`; return work if `async_op`.
    This all-to-all, without a gradient, is for contiguous tensors in a group of several ranks.
    """
    group.record_call("all_to_all", tensor)
    if group.has_no_process_group:
        return CompletedCollective()
    work = dist.all_to_all_single(
        out, tensor, list(out_splits), list(in_splits), group=group.process_group, async_op=async_op
    )
    return _pending_work(work, group)


@dataclass(frozen=True)
class RingTransfer:
    """Ring exchange in progress: this rank's tensor to the next rank, and the previous rank's to this one.
    `sent` goes to the next rank; the previous rank's tensor arrives in `arriving`.
    """

    sent: Tensor
    arriving: Tensor
    works: Sequence[CollectiveWork]

    def wait(self) -> Tensor:
        """Wait for the ring exchange, sent and received, and return the tensor of the previous rank."""
        for work in self.works:
            work.wait()
        return self.arriving


def start_ring_transfer(tensor: Tensor, group: CommGroup) -> RingTransfer:
    """Start to send a tensor to the next rank of the group and to receive the previous rank's tensor.
    `tensor` must be contiguous; the received tensor has an equal size.
    """
    arriving = torch.empty_like(tensor)
    group.record_call("pass", tensor)
    if group.has_no_process_group:
        return RingTransfer(tensor, arriving, [])
    after, before = (group.ranks[(group.rank + step) % group.size] for step in (1, -1))
    send = dist.P2POp(dist.isend, tensor, after, group.process_group)
    receive = dist.P2POp(dist.irecv, arriving, before, group.process_group)
    return RingTransfer(
        tensor, arriving, [PendingCollective(work, group) for work in dist.batch_isend_irecv([send, receive])]
    )


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


# gloo raises a plain RuntimeError
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed out waiting|\[?gloo|socket", re.IGNORECASE
)
_SOURCE_LINE = re.compile(r"^\[\S+:\d+\] ")


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether a torch error's type or message says that another rank or the key-value store is lost."""
    return isinstance(error, dist.DistError) or _LOST.search(str(error)) is not None


def connection_error_reason(error: RuntimeError) -> str:
    """Return the first sentence of the message of a torch error about a lost connection.
    The source location and the stack that torch appends are removed.
    """
    return _SOURCE_LINE.sub("", str(error)).strip().splitlines()[0].split(". ")[0]
