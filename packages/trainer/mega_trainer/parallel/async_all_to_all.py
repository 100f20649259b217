"""Asynchronous all-to-all of rows, overlapped with computation in forward and backward.

An exchange is two nodes of the autograd graph, start and wait: operations between them overlap with it. In the backward the
reverse exchange of the gradient starts at the wait node and is waited for at the start node. Autograd runs the most recent
ready node first, so the backwards of those operations overlap with the reverse exchange too.

Tables have one more row than is sent: the last row is unused, as in `ExpertRowAssignment`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.distributed.comm import CollectiveWork, CommGroup, all_to_all_into
from mega_trainer.parallel.pass_interleaver import PassInterleaver

# (rows, of which the first are sent; row counts to and from each rank; rows of the received table) -> (received table,
# complete after the wait, with the received rows first; handle to wait for)
AllToAllFunction = Callable[[Tensor, Any, Any, int], tuple[Tensor, CollectiveWork]]


@dataclass(frozen=True)
class HostCountAllToAll:
    """All-to-all of rows (`AllToAllFunction`) by torch.distributed, which needs the row counts on the host.
    With an `interleaver`, another pass runs before the wait for the rows.
    """

    group: CommGroup
    interleaver: PassInterleaver | None = None

    def __call__(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], length: int
    ) -> tuple[Tensor, CollectiveWork]:
        """Start an all-to-all of the first of `rows`; return the received table and a handle to wait for.
        `sent` and `received` are the row counts to and from each rank; the table has `length` rows.
        """
        table = rows.new_empty((length, *rows.shape[1:]))
        out, own = table[: sum(received)], rows[: sum(sent)].contiguous()
        work = all_to_all_into(out, own, self.group, received, sent, async_op=True)
        assert work is not None
        return table, work if self.interleaver is None else self.interleaver.interleave_wait(work)


@dataclass
class AsyncAllToAll:
    """One asynchronous all-to-all of rows, and the reverse all-to-all of its gradient in the backward.

    Attributes:
        wire: performs the exchange.
        sent, received: row counts to and from each rank, in the wire's form.
        length: rows of the received table.
    """

    wire: AllToAllFunction
    sent: Any
    received: Any
    length: int
    _pending: tuple[Tensor, CollectiveWork] | None = None  # set between the two nodes of a pass

    def start_forward(self, rows: Tensor) -> Tensor:
        """Start the all-to-all of the forward and return the table of received rows, complete after `wait_for_table`.
        The first of `rows` are sent.
        """
        self._pending = self.wire(rows, self.sent, self.received, self.length)
        return self._pending[0]

    def start_backward(self, rows: Tensor, length: int) -> None:
        """Start the reverse all-to-all, which sends gradient rows back to their ranks.
        The received rows go into a tensor of `length` rows.
        """
        self._pending = self.wire(rows, self.received, self.sent, length)

    def wait_for_table(self) -> Tensor:
        """Wait for the all-to-all in progress and return the tensor of received rows."""
        assert self._pending is not None
        (table, work), self._pending = self._pending, None
        work.wait()
        return table


class _StartExchange(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AsyncAllToAll) -> Tensor:
        ctx.exchange = exchange
        return exchange.start_forward(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.wait_for_table(), None


class _WaitForExchange(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, exchange: AsyncAllToAll, length: int) -> Tensor:
        ctx.exchange, ctx.length = exchange, length
        exchange.wait_for_table()
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.exchange.start_backward(dy, ctx.length)
        return dy, None, None  # `_StartExchange.backward` returns the received gradient


def start_host_copy(table: Tensor) -> Callable[[], Any]:
    """Start to copy an integer tensor to the host; return a function that waits for the copy and returns its `tolist()`."""
    host = table.to("cpu", non_blocking=True)
    if not table.is_cuda:
        return host.tolist
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait_and_read() -> Any:
        copied.synchronize()
        return host.tolist()

    return wait_and_read


def start_row_all_to_all(rows: Tensor, exchange: AsyncAllToAll) -> Callable[[], Tensor]:
    """Start a differentiable all-to-all of rows; return a function that waits for the received rows and returns them.
    The all-to-all `exchange` sends the first of `rows`; the received rows are [length, ..].
    """
    out: Tensor = _StartExchange.apply(rows, exchange)  # type: ignore[no-untyped-call]

    def wait_for_table() -> Tensor:
        table: Tensor = _WaitForExchange.apply(out, exchange, len(rows))  # type: ignore[no-untyped-call]
        return table

    return wait_for_table
